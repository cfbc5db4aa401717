//! The running domains of the system's libvirt, from the [status files](crate::status_file) of its daemon, which need
//! not run.

use crate::status_file::{DomainRecord, StatusFile, StatusFileError};
use rekindle_kernel::process::Process;
use rekindle_qemu::outdated::{self, Outdated};
use rekindle_qemu::program::Program;
use std::fs;
use std::io;
use std::path::Path;

/// libvirt's prefix of the ids of QEMU's character devices; the alias of the device follows.
pub const CHARDEV_PREFIX: &str = "char";

/// Returns the domain's QEMU, or `None` if it has ended: another process with its number does not have the domain's UUID
/// on its command line.
#[must_use]
pub fn qemu(domain: &DomainRecord) -> Option<Program> {
    let program = Program::of(Process::of(domain.pid).ok()?).ok()?;
    let uuid = domain.uuid.to_string();
    let has_uuid = program.arguments.windows(2).any(|pair| pair[0] == "-uuid" && pair[1] == uuid);
    has_uuid.then_some(program)
}

/// Returns how the domain's QEMU differs from the one that libvirt would start now.
///
/// # Errors
/// When the files of the two cannot be read.
pub fn outdated(domain: &DomainRecord) -> io::Result<Option<Outdated>> {
    match qemu(domain) {
        Some(program) => outdated::compare(&program, &domain.emulator),
        None => Ok(None),
    }
}

/// Reads the status of all domains of the daemon that has its files in `directory`, sorted by file name. A directory
/// that does not exist has no domains: libvirt is not installed.
///
/// # Errors
/// When the directory cannot be listed, or a file in it not be opened: only root may.
pub fn all(directory: &Path) -> io::Result<Vec<Result<DomainRecord, StatusFileError>>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut paths: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xml"));
    paths.sort();
    let mut domains = Vec::new();
    for path in paths {
        match StatusFile::read(&path).and_then(|file| file.parse()) {
            // The domain has ended since the directory was listed.
            Err(StatusFileError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(StatusFileError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(source);
            }
            read => domains.push(read),
        }
    }
    Ok(domains)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status_file::MAX_FILE_BYTES;
    use rekindle_testing::{DEADLINE, wait_for};
    use std::fs::File;
    use std::os::unix::fs::symlink;
    use std::process::{Child, Command, Stdio};
    use tempfile::TempDir;

    /// Written by libvirt 9.0.
    const LIBVIRT_9_0: &str = include_str!("../tests/status/libvirt-9.0.xml");

    #[test]
    fn all_domains_are_read_and_a_damaged_file_is_reported_with_them() {
        let directory = TempDir::new().unwrap();
        assert!(all(&directory.path().join("absent")).unwrap().is_empty());
        fs::write(directory.path().join("b.xml"), LIBVIRT_9_0).unwrap();
        fs::write(directory.path().join("b.pid"), "25870").unwrap();
        fs::write(directory.path().join("c.xml"), "<domstatus").unwrap();
        // The daemon removes a file between the listing and the reading.
        symlink("gone", directory.path().join("a.xml")).unwrap();
        let read = all(directory.path()).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].as_ref().unwrap().name, "golden-user");
        assert!(matches!(&read[1], Err(StatusFileError::Malformed { path, .. }) if path.ends_with("c.xml")));
        let huge = directory.path().join("huge.xml");
        File::create(&huge).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(matches!(StatusFile::read(&huge), Err(StatusFileError::TooLarge { .. })));
    }

    #[test]
    fn another_process_with_the_number_of_a_qemu_is_not_taken_for_it() {
        let directory = TempDir::new().unwrap();
        fs::write(directory.path().join("a.xml"), LIBVIRT_9_0).unwrap();
        let mut domain = all(directory.path()).unwrap().remove(0).unwrap();
        let uuid = domain.uuid.to_string();
        let start = |arguments: &[&str]| {
            let mut shell = Command::new("sh");
            // It waits for a line that is never written.
            shell.args(["-c", "read -r line", "sh"]).args(arguments).stdin(Stdio::piped());
            KilledChild(shell.spawn().unwrap())
        };
        let (other_child, qemu_child) = (start(&["-uuid", "another"]), start(&["-uuid", &uuid]));
        domain.pid = qemu_child.0.id();
        // A process has no command line for a moment after its start.
        wait_for("a command line", DEADLINE, || qemu(&domain));
        domain.pid = other_child.0.id();
        wait_for("a command line", DEADLINE, || {
            let program = Program::of(Process::of(other_child.0.id()).unwrap()).unwrap();
            program.arguments.contains(&"another".to_owned()).then_some(())
        });
        assert_eq!(qemu(&domain), None);
    }

    struct KilledChild(Child);

    impl Drop for KilledChild {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
