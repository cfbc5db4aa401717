//! A block device that a test can break and repair: a loop device over a file in a tmpfs of its own.

use super::Lab;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs of a given size.
pub struct Tmpfs {
    /// The mount point.
    pub path: PathBuf,
}

/// Runs a command that has to succeed and returns its standard output.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl Tmpfs {
    pub fn new(lab: &Lab, name: &str, mib: u64) -> Self {
        let path = lab.path(name);
        fs::create_dir(&path).unwrap();
        let size = format!("size={mib}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "rekindle-test", path.to_str().unwrap()]);
        Self { path }
    }

    pub fn resize(&self, mib: u64) {
        run("mount", &["-o", &format!("remount,size={mib}m"), self.path.to_str().unwrap()]);
    }

    fn junk(&self) -> PathBuf {
        self.path.join("junk")
    }

    /// Fills all free space.
    pub fn fill(&self) {
        let mut junk = File::create(self.junk()).unwrap();
        while junk.write_all(&[0; 4096]).is_ok() {}
    }

    /// Frees the space that [`Tmpfs::fill`] has taken.
    pub fn empty(&self) {
        fs::remove_file(self.junk()).unwrap();
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// A loop device. A test can remove its end and restore it.
pub struct Device {
    pub path: PathBuf,
    /// The file behind the device.
    pub backing: PathBuf,
    /// The removed content and its offset in bytes.
    removed: Option<(u64, Vec<u8>)>,
}

impl Device {
    /// Creates a device with a copy of `image`.
    pub fn copy_of(small: &Tmpfs, image: &Path) -> Self {
        let backing = small.path.join("backing");
        fs::copy(image, &backing).unwrap();
        let path = run("losetup", &["--find", "--show", backing.to_str().unwrap()]);
        Self { path: PathBuf::from(path), backing, removed: None }
    }

    /// Removes the content from byte `at` on, so that reading it is an error. With `capacity_updated`, the device
    /// becomes shorter, so that writing to the removed part is an error, too.
    pub fn truncate(&mut self, at: u64, capacity_updated: bool) {
        let file = OpenOptions::new().read(true).write(true).open(&self.backing).unwrap();
        let mut rest = vec![0; (file.metadata().unwrap().len() - at) as usize];
        file.read_exact_at(&mut rest, at).unwrap();
        file.set_len(at).unwrap();
        self.removed = Some((at, rest));
        if capacity_updated {
            self.update_capacity();
        }
    }

    /// Restores the removed content.
    pub fn repair(&mut self) {
        let (at, rest) = self.removed.take().expect("content was removed");
        OpenOptions::new().write(true).open(&self.backing).unwrap().write_all_at(&rest, at).unwrap();
        self.update_capacity();
    }

    fn update_capacity(&self) {
        run("losetup", &["--set-capacity", self.path.to_str().unwrap()]);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The kernel detaches a device that is still open when it is closed.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
