//! Whether a running QEMU is older than the one that is installed. An upgrade of the package replaces the file, and
//! QEMUs that run continue with the removed one, with its defects, until they are replaced. `needrestart` reports the
//! same for services.
//!
//! Files are compared by their build ID, a digest that the linker writes into a program, so that a file that was only
//! installed again is not reported.

use crate::binary::program_file;
use crate::program::{Program, position_of};
use object::{Object, ReadCache};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// What QEMU prints for `-version` before the version. The text is in the program's file.
const VERSION_PREFIX: &[u8] = b"QEMU emulator version ";
/// Limit of a version, which may contain the distribution's: `7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`.
const MAX_VERSION_BYTES: usize = 128;
/// Limit of the results that [`Comparisons`] keeps.
const MAX_KNOWN_COMPARISONS: usize = 1000;

/// How a running QEMU differs from the installed one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "reason")]
pub enum Outdated {
    /// Its file was removed, and no file has the name now.
    Removed,
    /// The installed QEMU has another version.
    OtherVersion { running: String, installed: String },
    /// The same version was built again, for example with a security fix.
    OtherBuild,
}

impl fmt::Display for Outdated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Removed => f.write_str("its file was removed"),
            Self::OtherVersion { running, installed } => write!(f, "{installed} is installed, {running} runs"),
            Self::OtherBuild => f.write_str("another build of its version is installed"),
        }
    }
}

/// Compares a running QEMU with the file that would be started for its guest now. If `installed` is no program but a
/// script that starts one, the file that now has the running program's name is compared.
///
/// # Errors
/// `PermissionDenied` for the QEMU of another user; `NotFound` if it has ended.
pub fn compare(running: &Program, installed: &Path) -> io::Result<Option<Outdated>> {
    Comparisons::default().compare(running, installed)
}

/// Comparisons that have been made, so that the files of many QEMUs, or of one at many times, are read once.
#[derive(Debug, Default)]
pub struct Comparisons {
    results: HashMap<[FileVersion; 2], Option<Outdated>>,
}

/// Device, inode, length, and modification time in seconds and nanoseconds.
type FileVersion = (u64, u64, u64, i64, i64);

impl Comparisons {
    /// Does the same as [`compare`].
    ///
    /// # Errors
    /// As for [`compare`].
    pub fn compare(&mut self, running: &Program, installed: &Path) -> io::Result<Option<Outdated>> {
        let Some((running_file, installed_file)) = open_files(running, installed)? else {
            return Ok(Some(Outdated::Removed));
        };
        let versions = [file_version(&running_file)?, file_version(&installed_file)?];
        if let Some(known) = self.results.get(&versions) {
            return Ok(known.clone());
        }
        let result = compare_files(running_file, installed_file)?;
        if self.results.len() >= MAX_KNOWN_COMPARISONS {
            self.results.clear();
        }
        self.results.insert(versions, result.clone());
        Ok(result)
    }
}

/// Opens the file of the running program and the installed one. `None`: no file is installed.
fn open_files(running: &Program, installed: &Path) -> io::Result<Option<(File, File)>> {
    let running_file = running.open_file()?;
    let installed = program_file(installed).ok_or(io::ErrorKind::NotFound.into());
    let installed_file = match installed.and_then(File::open) {
        Ok(file) if build_id(&file).is_some() => Ok(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(e),
        _ => running.files.first().map_or(Err(io::ErrorKind::NotFound.into()), File::open),
    };
    let installed_file = match installed_file {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    Ok(Some((running_file, installed_file)))
}

fn compare_files(running_file: File, installed_file: File) -> io::Result<Option<Outdated>> {
    if is_same_file(&running_file, &installed_file)? {
        return Ok(None);
    }
    if let (Some(running_build), Some(installed_build)) = (build_id(&running_file), build_id(&installed_file))
        && running_build == installed_build
    {
        return Ok(None);
    }
    Ok(Some(match (version(running_file)?, version(installed_file)?) {
        (Some(running), Some(installed)) if running != installed => Outdated::OtherVersion { running, installed },
        _ => Outdated::OtherBuild,
    }))
}

fn file_version(file: &File) -> io::Result<FileVersion> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
}

fn is_same_file(first: &File, second: &File) -> io::Result<bool> {
    let (first, second) = (first.metadata()?, second.metadata()?);
    Ok((first.dev(), first.ino()) == (second.dev(), second.ino()))
}

/// Returns the build ID of a program; `None` if the file has none, or is no program.
fn build_id(file: &File) -> Option<Vec<u8>> {
    let cache = ReadCache::new(file);
    let program = object::File::parse(&cache).ok()?;
    program.build_id().ok()?.map(<[u8]>::to_vec)
}

/// Returns the version that a QEMU's file contains.
fn version(file: File) -> io::Result<Option<String>> {
    let Some(prefix_position) = position_of(file.try_clone()?, VERSION_PREFIX)? else { return Ok(None) };
    let mut text = [0; MAX_VERSION_BYTES];
    let length = file.read_at(&mut text, prefix_position + VERSION_PREFIX.len() as u64)?;
    let version = text[..length].split(|&byte| byte == b'\n' || byte == 0).next().unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(version).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_kernel::process::Process;
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::process::{Child, Command};
    use tempfile::TempDir;

    /// A copy of `sleep` that runs, in place of a QEMU: only its file matters.
    struct Sleeper {
        directory: TempDir,
        child: Child,
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    impl Sleeper {
        fn start() -> Self {
            let directory = TempDir::new().unwrap();
            let file = directory.path().join("qemu");
            fs::copy("/bin/sleep", &file).unwrap();
            let child = Command::new(&file).arg("600").spawn().unwrap();
            Self { directory, child }
        }

        /// Replaces the file as a package manager does: the new file gets the name.
        fn replace_file_by(&self, source: &Path) {
            let new_file = self.directory.path().join("new");
            fs::copy(source, &new_file).unwrap();
            fs::rename(new_file, self.directory.path().join("qemu")).unwrap();
        }

        fn compare(&self) -> Option<Outdated> {
            let program = Program::of(Process::of(self.child.id()).unwrap()).unwrap();
            let mut known = Comparisons::default();
            let installed = self.directory.path().join("qemu");
            let result = known.compare(&program, &installed).unwrap();
            assert_eq!(known.compare(&program, &installed).unwrap(), result, "from the known ones");
            result
        }
    }

    #[test]
    fn a_program_is_outdated_after_its_file_was_replaced_by_another_build() {
        let sleeper = Sleeper::start();
        assert_eq!(sleeper.compare(), None, "its own file");
        sleeper.replace_file_by(Path::new("/bin/sleep"));
        assert_eq!(sleeper.compare(), None, "installed again");
        sleeper.replace_file_by(Path::new("/bin/cat"));
        assert_eq!(sleeper.compare(), Some(Outdated::OtherBuild));
        fs::remove_file(sleeper.directory.path().join("qemu")).unwrap();
        assert_eq!(sleeper.compare(), Some(Outdated::Removed));
    }

    #[test]
    fn the_version_of_a_qemu_is_read_from_its_file() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("qemu");
        fs::copy("/bin/sleep", &path).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"\0QEMU emulator version 7.2.22\n").unwrap();
        let file = File::open(&path).unwrap();
        assert!(build_id(&file).is_some());
        assert_eq!(version(file).unwrap().as_deref(), Some("7.2.22"), "it does not depend on what was read before");
        fs::write(&path, b"\0\x01QEMU emulator version 7.2.22 (Debian 1:7.2)\nCopyright").unwrap();
        assert_eq!(version(File::open(&path).unwrap()).unwrap().as_deref(), Some("7.2.22 (Debian 1:7.2)"));
        fs::write(&path, b"another program").unwrap();
        assert_eq!(version(File::open(&path).unwrap()).unwrap(), None);
    }
}
