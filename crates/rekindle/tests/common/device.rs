//! A block device that a test makes sick and well again: a loop device over a file in a tmpfs of its own.

use super::Lab;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs of so many MiB.
pub struct Small {
    /// Where it is mounted.
    pub path: PathBuf,
}

/// Run a command that has to succeed; what it says.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl Small {
    pub fn new(lab: &Lab, name: &str, mib: u64) -> Self {
        let path = lab.path(name);
        fs::create_dir(&path).unwrap();
        let size = format!("size={mib}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "rekindle-test", path.to_str().unwrap()]);
        Self { path }
    }

    /// Give it another size.
    pub fn resize(&self, mib: u64) {
        run("mount", &["-o", &format!("remount,size={mib}m"), self.path.to_str().unwrap()]);
    }

    fn junk(&self) -> PathBuf {
        self.path.join("junk")
    }

    /// Leave no room in it.
    pub fn fill(&self) {
        let mut junk = File::create(self.junk()).unwrap();
        while junk.write_all(&[0; 4096]).is_ok() {}
    }

    /// Have room again.
    pub fn empty(&self) {
        fs::remove_file(self.junk()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// See [the module](self).
pub struct Device {
    /// The device.
    pub path: PathBuf,
    /// Its content.
    pub backing: PathBuf,
    /// What was cut off.
    cut: Option<(u64, Vec<u8>)>,
}

impl Device {
    /// With the content of `image`, which stays.
    pub fn of(small: &Small, image: &Path) -> Self {
        let backing = small.path.join("backing");
        fs::copy(image, &backing).unwrap();
        let path = run("losetup", &["--find", "--show", backing.to_str().unwrap()]);
        Self { path: PathBuf::from(path), backing, cut: None }
    }

    /// What is behind byte `at` has gone: to read it is an error. `told`: the device is shorter, so that writing there is one too.
    pub fn cut(&mut self, at: u64, told: bool) {
        let file = OpenOptions::new().read(true).write(true).open(&self.backing).unwrap();
        let mut rest = vec![0; (file.metadata().unwrap().len() - at) as usize];
        file.read_exact_at(&mut rest, at).unwrap();
        file.set_len(at).unwrap();
        self.cut = Some((at, rest));
        if told {
            self.tell();
        }
    }

    /// It is as it was.
    pub fn mend(&mut self) {
        let (at, rest) = self.cut.take().expect("something was cut off");
        OpenOptions::new().write(true).open(&self.backing).unwrap().write_all_at(&rest, at).unwrap();
        self.tell();
    }

    fn tell(&self) {
        run("losetup", &["--set-capacity", self.path.to_str().unwrap()]);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // One that is still open goes when it is closed.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
