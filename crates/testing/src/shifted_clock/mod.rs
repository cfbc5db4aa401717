//! A host's real-time clock that jumps, for the processes of a test. The machine's clock does not change.
//!
//! A library that is loaded before the C library (`LD_PRELOAD`) adds an offset to the real-time clock. The other clocks stay as
//! they are, as when an administrator or a time service sets the clock of a host.
//!
//! *Limit:* the kernel's own times stay, such as those of files.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, io};
use tempfile::TempDir;

/// Seconds of a year.
pub const YEAR_S: i64 = 365 * 86_400;

const SOURCE: &str = include_str!("preload.c");
/// The variable that names the file with the offset.
const OFFSET_FILE: &str = "REKINDLE_TEST_CLOCK";

/// The clock of all processes that have its [`ShiftedClock::environment`].
#[derive(Debug)]
pub struct ShiftedClock {
    directory: TempDir,
    offset: File,
}

impl ShiftedClock {
    /// Builds the library. The clock is right until it jumps.
    ///
    /// # Panics
    /// If there is no C compiler.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("rekindle-test-clock-").tempdir().unwrap();
        // A QEMU has a user of its own.
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let source = directory.path().join("preload.c");
        fs::write(&source, SOURCE).unwrap();
        let library = library(directory.path());
        let built = Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(built.unwrap_or_else(|e| panic!("cc: {e}; run: scripts/setup")).success());
        let offset = OpenOptions::new().write(true).create_new(true).open(offset_file(directory.path())).unwrap();
        let clock = Self { directory, offset };
        clock.set(0);
        clock
    }

    /// Returns the variables with which a process has this clock.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let path = self.directory.path();
        [("LD_PRELOAD", text(library(path))), (OFFSET_FILE, text(offset_file(path)))]
    }

    /// Lets the clock jump, so that it is `seconds` ahead of the machine's.
    pub fn set(&self, seconds: i64) {
        write_offset(&self.offset, seconds).unwrap();
    }

    /// Returns a command for a shell that does the same as [`Self::set`].
    #[must_use]
    pub fn command_to_set(&self, seconds: i64) -> String {
        let bytes: String = seconds.to_ne_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
        let file = offset_file(self.directory.path());
        // The file is mapped: it must not become shorter.
        format!("printf '{bytes}' | dd of='{}' conv=notrunc status=none", file.display())
    }
}

impl Default for ShiftedClock {
    fn default() -> Self {
        Self::new()
    }
}

/// Lets the clock of this process jump, which has the environment of a [`ShiftedClock`].
///
/// # Panics
/// If it has not.
pub fn set_own(seconds: i64) {
    let path = env::var_os(OFFSET_FILE).expect("the environment of a shifted clock");
    write_offset(&OpenOptions::new().write(true).open(path).unwrap(), seconds).unwrap();
}

fn write_offset(file: &File, seconds: i64) -> io::Result<()> {
    file.write_all_at(&seconds.to_ne_bytes(), 0)
}

fn library(directory: &Path) -> PathBuf {
    directory.join("preload.so")
}

fn offset_file(directory: &Path) -> PathBuf {
    directory.join("offset")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_another_process_jumps() {
        let clock = ShiftedClock::new();
        let year = || {
            let output = Command::new("date").args(["-u", "+%s"]).envs(clock.environment()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse::<i64>().unwrap() / YEAR_S
        };
        let today = year();
        for years in [1, -1, 0] {
            clock.set(years * YEAR_S);
            assert_eq!(year(), today + years);
            clock.set(7 * YEAR_S);
            assert!(Command::new("sh").args(["-c", &clock.command_to_set(years * YEAR_S)]).status().unwrap().success());
            assert_eq!(year(), today + years);
        }
    }
}
