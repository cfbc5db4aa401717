//! The file in which libvirt's daemon records a running domain, `/run/libvirt/qemu/NAME.xml`. From it, a daemon that is
//! started again finds the domain's QEMU. Only root may read it; the daemon need not run.
//!
//! Its format (`domstatus`) is libvirt's own and differs between versions. Only what all of them since 7.0 write is read,
//! and an edit replaces only the bytes that must change.

use roxmltree::{Document, Node};
use rustix::fs::{Gid, Mode, Uid, fchmod, fchown};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Where the daemon of the system (`qemu:///system`) has its status files.
pub const SYSTEM_DIRECTORY: &str = "/run/libvirt/qemu";
/// Limit of a status file. A domain with all devices that libvirt can give it has well under 1 MiB.
pub(crate) const MAX_FILE_BYTES: u64 = 16 << 20;
/// Elements that describe a character device.
const CHARACTER_DEVICES: [&str; 4] = ["serial", "parallel", "console", "channel"];

/// Why a status file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StatusFileError {
    #[error("cannot read {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}", path.display())]
    Unwritable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is larger than {} MiB, which no status file of libvirt is", path.display(), MAX_FILE_BYTES >> 20)]
    TooLarge { path: PathBuf },
    #[error("{} is not a status file of libvirt that Rekindle understands: {problem}", path.display())]
    Malformed { path: PathBuf, problem: String },
}

/// A running domain, as the daemon records it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainRecord {
    pub name: String,
    pub uuid: Uuid,
    /// Its QEMU. Another process may have the number if QEMU has ended while no daemon ran: see
    /// [`crate::domains::qemu`].
    pub pid: u32,
    /// libvirt's name of the state: `running`, `paused`.
    pub state: String,
    /// Path of the monitor socket.
    pub monitor: PathBuf,
    /// The QEMU that libvirt starts for this domain.
    pub emulator: PathBuf,
    /// libvirt's names of the features of the QEMU that runs.
    pub capabilities: BTreeSet<String>,
    /// Aliases of all devices.
    pub devices: BTreeSet<String>,
    /// What libvirt is doing with the domain, if anything.
    pub job: Option<String>,
}

/// Changes of a status file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusEdit {
    pub pid: u32,
    /// Threads of the virtual processors, by number.
    pub vcpus: BTreeMap<u32, u32>,
    /// Paths of ptys by the aliases of their devices.
    pub ptys: BTreeMap<String, String>,
    pub emulator: Option<PathBuf>,
    pub capabilities: Option<BTreeSet<String>>,
}

/// Identifies one version of a file that is replaced as a whole by each write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMark {
    device: u64,
    inode: u64,
}

impl FileMark {
    /// # Errors
    /// When the file cannot be found.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// The content of a status file.
#[derive(Debug, Clone)]
pub struct StatusFile {
    path: PathBuf,
    text: String,
}

impl StatusFile {
    /// Returns the path of the status file of domain `name`.
    #[must_use]
    pub fn path_of(name: &str) -> PathBuf {
        Path::new(SYSTEM_DIRECTORY).join(format!("{name}.xml"))
    }

    /// Reads a status file.
    ///
    /// # Errors
    /// [`StatusFileError`], which names the file.
    pub fn read(path: &Path) -> Result<Self, StatusFileError> {
        let unreadable = |source| StatusFileError::Unreadable { path: path.to_owned(), source };
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable)?;
        file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(StatusFileError::TooLarge { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), text })
    }

    /// Returns the XML.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// # Errors
    /// [`StatusFileError::Malformed`], which names what is missing or wrong.
    pub fn parse(&self) -> Result<DomainRecord, StatusFileError> {
        parse(&self.text).map_err(|problem| self.malformed(problem))
    }

    /// Returns the edited file. Everything that `edit` does not name stays as it is, byte for byte.
    ///
    /// # Errors
    /// [`StatusFileError::Malformed`] if the file has something for which `edit` has no value.
    pub fn edited(&self, edit: &StatusEdit) -> Result<Self, StatusFileError> {
        let text = edit_text(&self.text, edit).map_err(|problem| self.malformed(problem))?;
        let edited = Self { path: self.path.clone(), text };
        let record = edited.parse()?;
        if record.pid != edit.pid {
            return Err(self.malformed("the edit has not changed its process number".into()));
        }
        Ok(edited)
    }

    /// Replaces the file on disk.
    ///
    /// # Errors
    /// [`StatusFileError::Unwritable`]; the old file is unchanged.
    pub fn write(&self) -> Result<FileMark, StatusFileError> {
        self.write_to(&self.path)
    }

    /// Writes the content to the file `path`, or replaces that.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_to(&self, path: &Path) -> Result<FileMark, StatusFileError> {
        replace_file(path, &self.text)
            .and_then(|()| FileMark::of(path))
            .map_err(|source| StatusFileError::Unwritable { path: path.to_owned(), source })
    }

    pub(crate) fn malformed(&self, problem: String) -> StatusFileError {
        StatusFileError::Malformed { path: self.path.clone(), problem }
    }
}

/// Writes the file with the number of a domain's QEMU, which is next to its status file.
///
/// # Errors
/// [`StatusFileError::Unwritable`]; the old file is unchanged.
pub fn write_pid_file(status_file: &Path, pid: u32) -> Result<(), StatusFileError> {
    let path = status_file.with_extension("pid");
    replace_file(&path, &pid.to_string()).map_err(|source| StatusFileError::Unwritable { path, source })
}

/// Replaces a file by another of the same owner and mode: a reader finds the old or the new content. A new file can be
/// read by its owner only.
fn replace_file(path: &Path, content: &str) -> io::Result<()> {
    let metadata = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        metadata => Some(metadata?),
    };
    // The daemon reads every file whose name ends in `.xml`.
    let mut name = path.as_os_str().to_owned();
    name.push(".rekindle");
    let temporary = PathBuf::from(name);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(content.as_bytes())?;
    if let Some(metadata) = metadata {
        fchown(&file, Some(Uid::from_raw(metadata.uid())), Some(Gid::from_raw(metadata.gid())))?;
        fchmod(&file, Mode::from_raw_mode(metadata.mode() & 0o7777))?;
    }
    file.sync_data()?;
    fs::rename(&temporary, path)
}

fn parse(text: &str) -> Result<DomainRecord, String> {
    let document = Document::parse(text).map_err(|e| e.to_string())?;
    let root = document.root_element();
    if !root.has_tag_name("domstatus") {
        return Err(format!("its root is <{}> instead of <domstatus>", root.tag_name().name()));
    }
    let domain = child(root, "domain")?;
    let uuid = text_of(child(domain, "uuid")?);
    let pid = attribute(root, "pid")?;
    Ok(DomainRecord {
        name: text_of(child(domain, "name")?),
        uuid: uuid.parse().map_err(|_| format!("`{uuid}` is not a UUID"))?,
        pid: pid.parse().map_err(|_| format!("`{pid}` is not the number of a process"))?,
        state: attribute(root, "state")?.to_owned(),
        monitor: attribute(child(root, "monitor")?, "path")?.into(),
        emulator: text_of(child(child(domain, "devices")?, "emulator")?).into(),
        capabilities: names(child(root, "qemuCaps")?, "flag", "name"),
        devices: names(child(root, "devices")?, "device", "alias"),
        job: job(root),
    })
}

/// Returns what libvirt is doing with the domain.
fn job(root: Node<'_, '_>) -> Option<String> {
    if let Ok(job) = child(root, "job") {
        let kind = job.attribute("type").filter(|kind| *kind != "none");
        let asynchronous = job.attribute("async").filter(|kind| *kind != "none");
        if let Some(kind) = kind.or(asynchronous) {
            return Some(kind.to_owned());
        }
    }
    let block_jobs = child(root, "blockjobs").ok()?;
    (block_jobs.attribute("active") == Some("yes")).then(|| "a job on a disk".to_owned())
}

fn edit_text(text: &str, edit: &StatusEdit) -> Result<String, String> {
    let document = Document::parse(text).map_err(|e| e.to_string())?;
    let root = document.root_element();
    let domain = child(root, "domain")?;
    let devices = child(domain, "devices")?;
    let mut changes = vec![(attribute_range(root, "pid")?, edit.pid.to_string())];
    for vcpu in child(root, "vcpus")?.children().filter(|node| node.has_tag_name("vcpu")) {
        let id = attribute(vcpu, "id")?;
        let thread = id.parse().ok().and_then(|id: u32| edit.vcpus.get(&id));
        let thread = thread.ok_or_else(|| format!("the new QEMU has no virtual CPU {id}"))?;
        changes.push((attribute_range(vcpu, "pid")?, thread.to_string()));
    }
    for device in devices.children().filter(|node| CHARACTER_DEVICES.iter().any(|name| node.has_tag_name(*name))) {
        if device.attribute("type") != Some("pty") {
            continue;
        }
        let alias = attribute(child(device, "alias")?, "name")?;
        let path = edit.ptys.get(alias).ok_or_else(|| format!("the new QEMU has no pty for {alias}"))?;
        changes.push((attribute_range(child(device, "source")?, "path")?, escaped(path)));
        if device.has_attribute("tty") {
            changes.push((attribute_range(device, "tty")?, escaped(path)));
        }
    }
    if let Some(emulator) = &edit.emulator {
        let node = child(devices, "emulator")?.first_child().ok_or("<emulator> is empty")?;
        changes.push((node.range(), escaped(&emulator.to_string_lossy())));
    }
    if let Some(capabilities) = &edit.capabilities {
        let flags: String = capabilities.iter().map(|flag| format!("    <flag name='{}'/>\n", escaped(flag))).collect();
        changes.push((child(root, "qemuCaps")?.range(), format!("<qemuCaps>\n{flags}  </qemuCaps>")));
    }
    Ok(splice(text, changes))
}

/// Replaces ranges of bytes that do not overlap.
fn splice(text: &str, mut changes: Vec<(Range<usize>, String)>) -> String {
    changes.sort_by_key(|(range, _)| range.start);
    let mut edited = text.to_owned();
    for (range, replacement) in changes.into_iter().rev() {
        edited.replace_range(range, &replacement);
    }
    edited
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Result<Node<'a, 'input>, String> {
    let mut children = node.children().filter(|child| child.has_tag_name(name));
    children.next().ok_or_else(|| format!("<{}> has no <{name}>", node.tag_name().name()))
}

fn attribute<'a>(node: Node<'a, '_>, name: &str) -> Result<&'a str, String> {
    node.attribute(name).ok_or_else(|| format!("<{}> has no `{name}`", node.tag_name().name()))
}

fn attribute_range(node: Node<'_, '_>, name: &str) -> Result<Range<usize>, String> {
    let attribute = node.attribute_node(name);
    attribute.map(|found| found.range_value()).ok_or_else(|| format!("<{}> has no `{name}`", node.tag_name().name()))
}

fn names(node: Node<'_, '_>, element: &str, attribute: &str) -> BTreeSet<String> {
    let elements = node.children().filter(|child| child.has_tag_name(element));
    elements.filter_map(|child| child.attribute(attribute).map(str::to_owned)).collect()
}

fn text_of(node: Node<'_, '_>) -> String {
    node.text().unwrap_or_default().trim().to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "<!-- a note -->\n<domstatus state='running' reason='booted' pid='11'>
  <monitor path='/run/m.sock' type='unix'/>
  <vcpus>\n    <vcpu id='0' pid='12'/>\n    <vcpu id='1' pid='13'/>\n  </vcpus>
  <qemuCaps>\n    <flag name='kvm'/>\n    <flag name='sdl'/>\n  </qemuCaps>
  <devices>\n    <device alias='serial0'/>\n  </devices>
  <unknown future='yes'/>
  <domain type='qemu' id='1'>\n    <name>web</name>\n    <uuid>863ab25c-2987-4faf-afb3-86947fec2f2e</uuid>
    <devices>\n      <emulator>/usr/bin/q</emulator>
      <serial type='pty'>\n        <source path='/dev/pts/0'/>\n        <alias name='serial0'/>\n      </serial>
      <console type='pty' tty='/dev/pts/0'>\n        <source path='/dev/pts/0'/>\n        <alias name='serial0'/>\n      </console>
    </devices>\n  </domain>\n</domstatus>\n";

    /// Written by libvirt 9.0.
    const LIBVIRT_9_0: &str = include_str!("../tests/status/libvirt-9.0.xml");

    #[test]
    fn a_status_file_of_libvirt_is_read() {
        let record = parse(LIBVIRT_9_0).unwrap();
        assert_eq!((record.name.as_str(), record.pid, record.state.as_str()), ("golden-user", 25870, "paused"));
        assert_eq!(record.uuid.to_string(), "863ab25c-2987-4faf-afb3-86947fec2f2e");
        assert_eq!(record.emulator, Path::new("/usr/bin/qemu-system-x86_64"));
        assert!(record.monitor.ends_with("domain-1-golden-user/monitor.sock"));
        assert!(record.capabilities.contains("virtio-net") && record.devices.contains("serial0"));
        assert_eq!(record.job, None);
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
            let error = parse(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        let replaced = |from: &str, to: &str| parse(&LIBVIRT_9_0.replace(from, to)).unwrap_err();
        assert_eq!(replaced("pid='25870'", "pid='-1'"), "`-1` is not the number of a process");
        assert_eq!(replaced("863ab25c-", "863ab25c"), "`863ab25c2987-4faf-afb3-86947fec2f2e` is not a UUID");
        assert_eq!(replaced("emulator>", "other>"), "<devices> has no <emulator>");
    }

    fn edit() -> StatusEdit {
        StatusEdit {
            pid: 21,
            vcpus: BTreeMap::from([(0, 22), (1, 23)]),
            ptys: BTreeMap::from([("serial0".to_owned(), "/dev/pts/7".to_owned())]),
            emulator: None,
            capabilities: None,
        }
    }

    #[test]
    fn an_edit_changes_only_what_it_names() {
        let edited = edit_text(STATUS, &edit()).unwrap();
        let expected = STATUS
            .replace("pid='11'", "pid='21'")
            .replace("pid='12'", "pid='22'")
            .replace("pid='13'", "pid='23'")
            .replace("/dev/pts/0", "/dev/pts/7");
        assert_eq!(edited, expected);
        assert_eq!(edit_text(&edited, &edit()).unwrap(), edited, "a repeated edit has no effect");
    }

    #[test]
    fn another_emulator_comes_with_its_features() {
        let capabilities = BTreeSet::from(["kvm".to_owned(), "new".to_owned()]);
        let edit = StatusEdit { emulator: Some("/opt/a&b".into()), capabilities: Some(capabilities.clone()), ..edit() };
        let record = parse(&edit_text(STATUS, &edit).unwrap()).unwrap();
        assert_eq!((record.emulator, record.capabilities), (PathBuf::from("/opt/a&b"), capabilities));
    }

    #[test]
    fn a_device_that_the_new_qemu_does_not_have_is_named() {
        let edit = StatusEdit { ptys: BTreeMap::new(), ..edit() };
        assert_eq!(edit_text(STATUS, &edit).unwrap_err(), "the new QEMU has no pty for serial0");
    }

    #[test]
    fn jobs_are_found() {
        assert_eq!(parse(STATUS).unwrap().job, None);
        let job = STATUS.replace("<unknown", "<job type='none' async='migration out'/>\n<unknown");
        assert_eq!(parse(&job).unwrap().job.as_deref(), Some("migration out"));
        let block_job = STATUS.replace("<unknown", "<blockjobs active='yes'/>\n<unknown");
        assert_eq!(parse(&block_job).unwrap().job.as_deref(), Some("a job on a disk"));
    }
}
