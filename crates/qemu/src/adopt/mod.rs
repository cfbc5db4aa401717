//! A QEMU that Rekindle did not start: which process it is, what it runs, and what prevents protecting it.
//!
//! All that is known of it at first is a QMP socket. The kernel reports which process listens there; if that is no
//! QEMU (a manager such as libvirt makes the socket and passes it on), the QEMU is the one that holds the listening
//! socket. That it is the very one that answers is proved by its virtual CPUs: QMP names their threads, and they are
//! that process's.

mod obstacle;
mod peer;

pub use obstacle::Obstacle;

use crate::program::Program;
use crate::qmp::{Qmp, QmpError, Version};
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What stands for the socket where a manager passes commands on.
const MANAGED: &str = "its manager's monitor";

/// Why a QEMU cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its process cannot be found.
    #[error("cannot find which process serves {}: {why}", socket.display())]
    Unknown {
        /// The socket.
        socket: PathBuf,
        /// What was seen.
        why: String,
    },
    /// The process that was found is not the one that answers.
    #[error(
        "process {pid} listens on {}, but the QEMU that answers there has its virtual CPUs in other threads: is it in \
         another PID namespace?", socket.display()
    )]
    Other {
        /// The process.
        pid: u32,
        /// The socket.
        socket: PathBuf,
    },
    /// `/proc` does not show it.
    #[error("cannot inspect process {pid}: run as root")]
    Process {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A memory backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// Its id.
    pub id: Option<String>,
    /// Bytes.
    pub size: u64,
    /// Other processes can map it. QEMU before 6.1 does not report this.
    #[serde(default)]
    pub share: Option<bool>,
}

/// What is known of a running QEMU.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Adopted {
    /// Process number.
    pub pid: u32,
    /// Its start time, as in [`Process::started`].
    pub started: u64,
    /// What starts another one like it.
    pub binary: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The user it runs as.
    pub uid: u32,
    /// Its version.
    pub version: Version,
    /// The guest's name, if it was given one.
    pub name: Option<String>,
    /// The guest's UUID.
    pub uuid: String,
    /// `kvm`, `tcg`, or `other`.
    pub accelerator: String,
    /// Versioned machine type.
    pub machine: String,
    /// Memory backends.
    pub backends: Vec<Backend>,
    /// It has a device through which the guest gives memory back (balloon, virtio-mem).
    pub gives_back: bool,
    /// What prevents protecting it, each with the reason. Empty: nothing.
    pub obstacles: Vec<Obstacle>,
}

impl Adopted {
    /// Its process.
    #[must_use]
    pub fn process(&self) -> Process {
        Process { pid: self.pid, started: self.started }
    }
}

/// Finds out about the QEMU whose QMP socket is `socket`. The guest is not touched.
///
/// On success: what is known of it, and the connection.
///
/// # Errors
/// [`AdoptError`]; also when the process cannot be identified for certain.
pub fn adopt(socket: &Path, timeout: Duration) -> Result<(Adopted, Qmp), AdoptError> {
    adopt_over(Qmp::connect(socket, timeout)?, Some(socket))
}

/// The same over a connection that is there. Without a socket (a manager passes commands on) the process is found by
/// the threads of its virtual CPUs.
///
/// # Errors
/// As for [`adopt`].
pub fn adopt_over(mut qmp: Qmp, socket: Option<&Path>) -> Result<(Adopted, Qmp), AdoptError> {
    // Ask the kernel which process listens before sending anything to one that may not be a QEMU.
    let listens = socket.map(|socket| peer::process(&qmp, socket)).transpose()?;
    let threads = cpu_threads(&mut qmp)?;
    let process = listens.map_or_else(|| peer::of_threads(&threads, qmp.version()), Ok)?;
    let socket = socket.unwrap_or(Path::new(MANAGED));
    let failed = |source| AdoptError::Process { pid: process.pid, source };
    if !has_threads(process, &threads).map_err(failed)? {
        return Err(AdoptError::Other { pid: process.pid, socket: socket.to_owned() });
    }
    let Program { start: binary, arguments, .. } = Program::of(process).map_err(failed)?;
    let uid = std::os::unix::fs::MetadataExt::uid(&fs::metadata(format!("/proc/{}", process.pid)).map_err(failed)?);

    #[derive(Deserialize)]
    struct Name {
        name: Option<String>,
    }
    #[derive(Deserialize)]
    struct Uuid {
        #[serde(rename = "UUID")]
        uuid: String,
    }
    let Name { name } = qmp.execute("query-name", ())?;
    let Uuid { uuid } = qmp.execute("query-uuid", ())?;
    let nil = uuid.bytes().all(|byte| byte == b'0' || byte == b'-');
    let same = |word: &String| word.eq_ignore_ascii_case(&uuid);
    if socket == Path::new(MANAGED) && !nil && !arguments.iter().any(same) {
        // The threads' numbers were those of another PID namespace, and mean other threads here.
        return Err(AdoptError::Other { pid: process.pid, socket: socket.to_owned() });
    }
    let machine: String = qmp.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
    let backends = qmp.execute("query-memdev", ())?;
    let accelerator = accelerator(&mut qmp)?;
    let devices = obstacle::devices(&mut qmp)?;
    let obstacles = obstacle::all(&mut qmp, process, &devices)?;
    let adopted = Adopted {
        pid: process.pid,
        started: process.started,
        binary,
        arguments,
        uid,
        version: qmp.version().clone(),
        name,
        uuid,
        accelerator,
        machine: machine.strip_suffix("-machine").unwrap_or(&machine).to_owned(),
        backends,
        gives_back: devices.iter().any(|device| obstacle::gives_back(&device.kind)),
        obstacles,
    };
    Ok((adopted, qmp))
}

/// The threads of the virtual CPUs, as QEMU numbers them.
fn cpu_threads(qmp: &mut Qmp) -> Result<BTreeSet<u32>, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Cpu {
        thread_id: u32,
    }
    let cpus: Vec<Cpu> = qmp.execute("query-cpus-fast", ())?;
    Ok(cpus.into_iter().map(|cpu| cpu.thread_id).collect())
}

/// Whether `process` has all these threads, by their numbers in its own PID namespace.
fn has_threads(process: Process, wanted: &BTreeSet<u32>) -> io::Result<bool> {
    let mut own = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{}/task", process.pid))? {
        // A thread may end between the listing and the reading.
        let Ok(status) = fs::read_to_string(entry?.path().join("status")) else { continue };
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        own.extend(numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse::<u32>().ok()));
    }
    Ok(!wanted.is_empty() && wanted.is_subset(&own) && process.is_alive())
}

fn accelerator(qmp: &mut Qmp) -> Result<String, QmpError> {
    match qmp.execute::<Value>("query-accelerators", ()) {
        Ok(all) => {
            let enabled = all.get("enabled").and_then(Value::as_str).unwrap_or_default();
            return Ok(if ["kvm", "tcg"].contains(&enabled) { enabled } else { "other" }.into());
        }
        // A QEMU before 10.2.
        Err(QmpError::Refused { .. }) => {}
        Err(e) => return Err(e),
    }
    let kvm: Value = qmp.execute("query-kvm", ())?;
    if kvm.get("enabled").and_then(Value::as_bool) == Some(true) {
        return Ok("kvm".into());
    }
    // Under another accelerator it returns an error.
    let text = qmp.human("info jit")?;
    Ok(if text.contains("only available") || text.contains("unknown command") { "other" } else { "tcg" }.into())
}
