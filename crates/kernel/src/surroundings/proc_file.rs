//! The files in `/proc` of one process, with limits on their length and errors that name the file.

use super::EnvironmentError;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The kernel limits arguments and environment of a program together to 6 MiB.
const MAX_BYTES: u64 = 8 << 20;

/// The directory of a process or a thread.
pub(super) struct ProcDirectory {
    /// The process.
    pub pid: u32,
    directory: PathBuf,
}

impl ProcDirectory {
    pub fn of(pid: u32) -> Self {
        Self { pid, directory: format!("/proc/{pid}").into() }
    }

    /// Returns the directory of the calling process.
    pub fn this() -> Self {
        Self::of(std::process::id())
    }

    pub fn of_thread(pid: u32, thread: u32) -> Self {
        Self { pid, directory: format!("/proc/{pid}/task/{thread}").into() }
    }

    /// Returns whether the process or thread still exists.
    pub fn exists(&self) -> bool {
        self.directory.exists()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn error(&self, name: &str, source: io::Error) -> EnvironmentError {
        if source.raw_os_error() == Some(libc::ESRCH) || !self.exists() {
            return EnvironmentError::Ended { pid: self.pid };
        }
        EnvironmentError::Read { path: self.path(name), source }
    }

    /// An error of a file whose text has an unknown format.
    pub fn invalid(&self, name: &str, text: &str) -> EnvironmentError {
        self.error(name, io::Error::new(io::ErrorKind::InvalidData, format!("unknown format: {text:?}")))
    }

    pub fn text(&self, name: &str) -> Result<String, EnvironmentError> {
        let bytes = self.bytes(name).map_err(|e| self.error(name, e))?;
        String::from_utf8(bytes).map_err(|e| self.invalid(name, &e.to_string()))
    }

    /// Returns the environment variables with which the program was started, each as `NAME=VALUE`.
    pub fn variables(&self) -> Result<Vec<OsString>, EnvironmentError> {
        let bytes = self.bytes("environ").map_err(|e| self.error("environ", e))?;
        let variables = bytes.split(|&byte| byte == 0).filter(|variable| !variable.is_empty());
        Ok(variables.map(|variable| OsString::from_vec(variable.to_vec())).collect())
    }

    pub fn bytes(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.path(name))?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {MAX_BYTES} bytes")));
        }
        Ok(bytes)
    }
}
