//! What libvirt's daemon records of a running domain: one XML file for each domain, `/run/libvirt/qemu/NAME.xml`, from
//! which a daemon that was restarted finds its QEMUs again. Only root may read these files.
//!
//! The format is libvirt's own (`domstatus`) and differs between its versions. Only what all of them since 7.0 write
//! is read here. The daemon need not run.

use rekindle_kernel::process::Process;
use rekindle_qemu::outdated::{self, Outdated};
use rekindle_qemu::program::Program;
use roxmltree::{Document, Node};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Where the daemon of the system (`qemu:///system`) has its status files.
pub const SYSTEM_DIRECTORY: &str = "/run/libvirt/qemu";
/// Limit of a status file. A domain with all devices that libvirt can give it has well under 1 MiB.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Why a status file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error("cannot read {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is larger than {} MiB, which no status file of libvirt is", path.display(), MAX_FILE_BYTES >> 20)]
    TooLarge { path: PathBuf },
    #[error("{} is not a status file of libvirt: {problem}", path.display())]
    Malformed { path: PathBuf, problem: String },
}

/// A running domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainStatus {
    pub name: String,
    pub uuid: Uuid,
    /// Its QEMU. Another process may have the number if QEMU has ended while no daemon ran: see [`Self::qemu`].
    pub pid: u32,
    /// libvirt's name of the domain's state: `running`, `paused`.
    pub state: String,
    /// The QEMU that libvirt starts for this domain.
    pub emulator: PathBuf,
}

impl DomainStatus {
    /// Reads a status file.
    ///
    /// # Errors
    /// [`StatusError`], which names the file.
    pub fn read(path: &Path) -> Result<Self, StatusError> {
        let unreadable = |source| StatusError::Unreadable { path: path.to_owned(), source };
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable)?;
        file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(StatusError::TooLarge { path: path.to_owned() });
        }
        Self::parse(&text).map_err(|problem| StatusError::Malformed { path: path.to_owned(), problem })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let document = Document::parse(text).map_err(|e| e.to_string())?;
        let root = document.root_element();
        if !root.has_tag_name("domstatus") {
            return Err(format!("its root is <{}> instead of <domstatus>", root.tag_name().name()));
        }
        let attribute = |name: &str| root.attribute(name).ok_or(format!("<domstatus> has no `{name}`"));
        let domain = child(root, "domain")?;
        let pid = attribute("pid")?;
        let uuid = text_of(child(domain, "uuid")?);
        Ok(Self {
            name: text_of(child(domain, "name")?),
            uuid: uuid.parse().map_err(|_| format!("`{uuid}` is not a UUID"))?,
            pid: pid.parse().map_err(|_| format!("`{pid}` is not the number of a process"))?,
            state: attribute("state")?.to_owned(),
            emulator: text_of(child(child(domain, "devices")?, "emulator")?).into(),
        })
    }

    /// Returns the domain's QEMU, or `None` if it has ended: another process with its number does not have the
    /// domain's UUID on its command line.
    pub fn qemu(&self) -> Option<Program> {
        let program = Program::of(Process::of(self.pid).ok()?).ok()?;
        let uuid = self.uuid.to_string();
        let has_uuid = program.arguments.windows(2).any(|pair| pair[0] == "-uuid" && pair[1] == uuid);
        has_uuid.then_some(program)
    }

    /// Returns how the domain's QEMU differs from the one that libvirt would start now.
    ///
    /// # Errors
    /// When the files of the two cannot be read.
    pub fn outdated(&self) -> io::Result<Option<Outdated>> {
        match self.qemu() {
            Some(program) => outdated::compare(&program, &self.emulator),
            None => Ok(None),
        }
    }
}

/// Reads the status of all domains of the daemon that has its files in `directory`, sorted by file name. A directory
/// that does not exist has no domains: libvirt is not installed.
///
/// # Errors
/// When the directory cannot be listed, or a file in it not be opened: only root may.
pub fn all(directory: &Path) -> io::Result<Vec<Result<DomainStatus, StatusError>>> {
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
        match DomainStatus::read(&path) {
            // The domain has ended since the directory was listed.
            Err(StatusError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(StatusError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(source);
            }
            read => domains.push(read),
        }
    }
    Ok(domains)
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Result<Node<'a, 'input>, String> {
    let mut children = node.children().filter(|child| child.has_tag_name(name));
    children.next().ok_or_else(|| format!("<{}> has no <{name}>", node.tag_name().name()))
}

fn text_of(node: Node<'_, '_>) -> String {
    node.text().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_testing::{DEADLINE, wait_for};
    use std::os::unix::fs::symlink;
    use std::process::{Child, Command, Stdio};
    use tempfile::TempDir;

    /// Written by libvirt 9.0.
    const LIBVIRT_9_0: &str = include_str!("../tests/status/libvirt-9.0.xml");

    #[test]
    fn a_status_file_of_libvirt_is_read() {
        let expected = DomainStatus {
            name: "golden-user".into(),
            uuid: "863ab25c-2987-4faf-afb3-86947fec2f2e".parse().unwrap(),
            pid: 25870,
            state: "paused".into(),
            emulator: "/usr/bin/qemu-system-x86_64".into(),
        };
        assert_eq!(DomainStatus::parse(LIBVIRT_9_0), Ok(expected));
    }

    #[test]
    fn what_is_missing_or_wrong_in_a_status_file_is_named() {
        let deep = "<a>".repeat(100_000);
        let cases = [
            ("", "a root node"),
            ("<domain/>", "its root is <domain>"),
            ("<domstatus state='running' pid='1'/>", "<domstatus> has no <domain>"),
            (deep.as_str(), "never closed"),
            ("<!DOCTYPE a [<!ENTITY b 'c'>]><domstatus>&b;</domstatus>", "DTD"),
        ];
        for (text, problem) in cases {
            let error = DomainStatus::parse(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        let replaced = |from: &str, to: &str| DomainStatus::parse(&LIBVIRT_9_0.replace(from, to)).unwrap_err();
        assert_eq!(replaced("pid='25870'", "pid='-1'"), "`-1` is not the number of a process");
        assert_eq!(replaced("863ab25c-", "863ab25c"), "`863ab25c2987-4faf-afb3-86947fec2f2e` is not a UUID");
        assert_eq!(replaced("emulator>", "other>"), "<devices> has no <emulator>");
    }

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
        assert!(matches!(&read[1], Err(StatusError::Malformed { path, .. }) if path.ends_with("c.xml")));
        let huge = directory.path().join("huge.xml");
        File::create(&huge).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(matches!(DomainStatus::read(&huge), Err(StatusError::TooLarge { .. })));
    }

    #[test]
    fn another_process_with_the_number_of_a_qemu_is_not_taken_for_it() {
        let mut domain = DomainStatus::parse(LIBVIRT_9_0).unwrap();
        let uuid = domain.uuid.to_string();
        let start = |arguments: &[&str]| {
            let mut shell = Command::new("sh");
            // It waits for a line that is never written.
            shell.args(["-c", "read -r line", "sh"]).args(arguments).stdin(Stdio::piped());
            KilledChild(shell.spawn().unwrap())
        };
        let (other, qemu) = (start(&["-uuid", "another"]), start(&["-uuid", &uuid]));
        domain.pid = qemu.0.id();
        // A process has no command line for a moment after its start.
        wait_for("a command line", DEADLINE, || domain.qemu());
        domain.pid = other.0.id();
        wait_for("a command line", DEADLINE, || {
            let program = Program::of(Process::of(other.0.id()).unwrap()).unwrap();
            program.arguments.contains(&"another".to_owned()).then_some(())
        });
        assert_eq!(domain.qemu(), None);
    }

    struct KilledChild(Child);

    impl Drop for KilledChild {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
