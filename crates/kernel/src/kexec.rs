//! Loading the kernel that a shutdown starts at its end (`kexec_file_load(2)`).

use rustix::fd::AsRawFd;
use std::ffi::{CString, c_int, c_long, c_ulong};
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Unloads the loaded kernel (`linux/kexec.h`).
const KEXEC_FILE_UNLOAD: c_ulong = 1;
/// No initial RAM disk is passed.
const KEXEC_FILE_NO_INITRAMFS: c_ulong = 4;
const _: () = assert!(libc::SYS_kexec_file_load == 320, "the number of the call on x86-64");

/// Loads `kernel` with its initial RAM disk and command line. It replaces a kernel that was loaded before; nothing is
/// started yet.
///
/// # Errors
/// `PermissionDenied` without `CAP_SYS_BOOT`, or for an unsigned kernel in lockdown; `InvalidInput` and `ENOEXEC` for a
/// file that is not a kernel; `OutOfMemory` without enough memory. The error names the file.
pub fn load(kernel: &Path, initrd: Option<&Path>, command_line: &str) -> io::Result<()> {
    let named = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let open = |path: &Path| File::open(path).map_err(|e| named(path, e));
    let image = open(kernel)?;
    let ramdisk = initrd.map(open).transpose()?;
    let text = CString::new(command_line)?;
    let flags = if ramdisk.is_some() { 0 } else { KEXEC_FILE_NO_INITRAMFS };
    let ramdisk_fd = ramdisk.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the descriptors live through the call, and `text` has the given length, with its zero byte.
    let done = unsafe { call(image.as_raw_fd(), ramdisk_fd, text.as_bytes_with_nul(), flags) };
    if done == 0 { Ok(()) } else { Err(named(kernel, io::Error::last_os_error())) }
}

/// Unloads the loaded kernel. It is no error if none is loaded.
///
/// # Errors
/// `PermissionDenied` without `CAP_SYS_BOOT`.
pub fn unload() -> io::Result<()> {
    // SAFETY: with this flag the kernel ignores the other arguments.
    let done = unsafe { call(-1, -1, &[], KEXEC_FILE_UNLOAD) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether a kernel is loaded.
///
/// # Errors
/// `NotFound` when the running kernel was built without kexec.
pub fn is_loaded() -> io::Result<bool> {
    Ok(fs::read_to_string("/sys/kernel/kexec_loaded")?.trim() == "1")
}

/// # Safety
/// `text` is empty or ends with a zero byte.
unsafe fn call(kernel: c_int, initrd: c_int, text: &[u8], flags: c_ulong) -> c_long {
    let length = text.len() as c_ulong;
    // SAFETY: the arguments are those of the call; the pointer is to `length` bytes, which live through it.
    unsafe { libc::syscall(libc::SYS_kexec_file_load, kernel, initrd, length, text.as_ptr(), flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_kernel_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        assert!(load(&path, None, "").unwrap_err().to_string().contains("vmlinuz"));
        fs::write(&path, [0; 4096]).unwrap();
        // Without the privilege, or without kexec in this kernel, the load fails for another reason; the error names
        // the file in any case.
        assert!(load(&path, None, "quiet").unwrap_err().to_string().contains("vmlinuz"));
        assert!(load(&path, None, "a\0b").is_err());
    }
}
