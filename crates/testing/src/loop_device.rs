//! Loop devices, which end with the test. A `/dev` of a test's own may have no node of a device that the kernel makes later.

use rekindle_kernel::block_device::set_read_only;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The kernel's number of loop devices.
const LOOP_MAJOR: u32 = 7;
/// How often another process may take the device that was free.
const MAX_ATTEMPTS: usize = 20;

/// A loop device, and a link to it by which tests name it.
#[derive(Debug)]
pub struct LoopDevice {
    /// The link.
    pub path: PathBuf,
    /// The kernel's name of the device.
    pub device: PathBuf,
    /// The device exists while it is open.
    _open: File,
}

impl LoopDevice {
    /// Makes a device of `bytes` bytes in the new file `file`, with a link at `path`.
    pub fn create(path: &Path, file: &Path, bytes: u64) -> Self {
        File::create_new(file).unwrap().set_len(bytes).unwrap();
        let attached = (0..MAX_ATTEMPTS).find_map(|_| {
            let device = losetup(&["--find"]).unwrap();
            let number = device.trim_start_matches("/dev/loop").parse().unwrap();
            let (mode, id) = (Mode::from_raw_mode(0o660), makedev(LOOP_MAJOR, number));
            match mknodat(CWD, &device, FileType::BlockDevice, mode, id) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => panic!("{device}: {e}"),
            }
            losetup(&[&device, file.to_str().unwrap()]).ok().map(|_| device)
        });
        let device = attached.expect("a free loop device");
        let open = File::open(&device).unwrap();
        // Detaches it when no program has it open any more.
        losetup(&["--detach", &device]).unwrap();
        // It outlives an earlier use of the device.
        set_read_only(Path::new(&device), false).unwrap();
        let made = Self { path: path.to_owned(), device: device.into(), _open: open };
        made.link();
        made
    }

    /// Lets the link name this device.
    pub fn link(&self) {
        let _ = fs::remove_file(&self.path);
        symlink(&self.device, &self.path).unwrap();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = set_read_only(&self.device, false);
    }
}

fn losetup(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("losetup").args(arguments).output().expect("losetup of the package mount");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
