//! Loading the kernel that a shutdown starts at its end (`kexec_file_load(2)`).

use rustix::fd::AsRawFd;
use std::ffi::{CString, c_int, c_long, c_ulong};
use std::fs::File;
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
/// file that is not a kernel, or a command line with a zero byte; `OutOfMemory` without enough memory. The error names
/// the file.
pub fn load(kernel: &Path, initrd: Option<&Path>, command_line: &str) -> io::Result<()> {
    let naming = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let open = |path: &Path| File::open(path).map_err(|e| naming(path, e));
    let kernel_file = open(kernel)?;
    let initrd_file = initrd.map(open).transpose()?;
    let command_line = CString::new(command_line).map_err(|e| {
        let text = format!("{}: its command line has a zero byte at position {}", kernel.display(), e.nul_position());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    let flags = if initrd_file.is_some() { 0 } else { KEXEC_FILE_NO_INITRAMFS };
    let initrd_fd = initrd_file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the descriptors live through the call, and the command line ends with its zero byte.
    let result =
        unsafe { kexec_file_load(kernel_file.as_raw_fd(), initrd_fd, command_line.as_bytes_with_nul(), flags) };
    if result == 0 { Ok(()) } else { Err(naming(kernel, io::Error::last_os_error())) }
}

/// Unloads the loaded kernel. It is no error if none is loaded.
///
/// # Errors
/// `PermissionDenied` without `CAP_SYS_BOOT`.
pub fn unload() -> io::Result<()> {
    // SAFETY: with this flag the kernel ignores the other arguments.
    let result = unsafe { kexec_file_load(-1, -1, &[], KEXEC_FILE_UNLOAD) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// # Safety
/// `command_line` is empty or ends with a zero byte.
unsafe fn kexec_file_load(kernel: c_int, initrd: c_int, command_line: &[u8], flags: c_ulong) -> c_long {
    let length = command_line.len() as c_ulong;
    // SAFETY: the arguments are those of the call; the pointer is to `length` bytes, which live through it.
    unsafe { libc::syscall(libc::SYS_kexec_file_load, kernel, initrd, length, command_line.as_ptr(), flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_file_that_is_not_a_kernel() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        assert!(load(&path, None, "").unwrap_err().to_string().contains("vmlinuz"));
        std::fs::write(&path, [0; 4096]).unwrap();
        // Without the privilege, or without kexec in this kernel, the load fails for another reason; the error names
        // the file in any case.
        assert!(load(&path, None, "quiet").unwrap_err().to_string().contains("vmlinuz"));
    }

    #[test]
    fn the_error_for_a_zero_byte_in_the_command_line_names_the_kernel_and_the_position() {
        let kernel = tempfile::NamedTempFile::new().unwrap();
        let e = load(kernel.path(), None, "quiet\0splash").unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
        let expected = format!("{}: its command line has a zero byte at position 5", kernel.path().display());
        assert_eq!(e.to_string(), expected);
    }
}
