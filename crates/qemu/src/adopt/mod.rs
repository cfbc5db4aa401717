//! A QEMU that Rekindle did not start: which process it is, what it runs, and what prevents protecting it.
//!
//! At first only a QMP socket is known. The kernel reports which process listens on it. If that process is no QEMU (a
//! manager such as libvirt makes the socket and passes it on), the QEMU is the process that holds the listening
//! socket. That this process is the one that answers is proved by its virtual CPUs: QMP reports their thread numbers,
//! and they must be threads of the process.

mod obstacle;
mod peer;

pub use obstacle::Obstacle;
pub(crate) use obstacle::{obstacle_of_network, obstacle_of_type};

use crate::program::Program;
use crate::qmp::{Qmp, QmpError, Version};
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Shown in place of the socket path if a manager passes commands on.
const MANAGER_MONITOR: &str = "its manager's monitor";

/// Why a QEMU cannot be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// QEMU does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot find which process serves {}: {why}", socket.display())]
    Unknown {
        socket: PathBuf,
        /// What was found instead.
        why: String,
    },
    #[error(
        "process {pid} listens on {}, but the QEMU that answers there has its virtual CPUs in other threads: is it in \
         another PID namespace?", socket.display()
    )]
    Other { pid: u32, socket: PathBuf },
    #[error("the VM's QEMU is process {expected}, but process {found} answers on its socket")]
    OtherQemu { expected: u32, found: u32 },
    #[error("cannot inspect process {pid}: run as root")]
    Process {
        pid: u32,
        #[source]
        source: io::Error,
    },
}

/// A memory backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBackend {
    /// Id of the backend object.
    pub id: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// Whether other processes can map it. QEMU before 6.1 does not report this.
    #[serde(default)]
    pub share: Option<bool>,
}

/// A running QEMU that Rekindle did not start, as found at its socket and in `/proc`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Adopted {
    pub pid: u32,
    /// Start time of the process, as in [`Process::started`].
    pub started: u64,
    /// The path that starts another QEMU of the same binary.
    pub binary: PathBuf,
    /// Arguments, without the program's name.
    pub arguments: Vec<String>,
    /// The user that the process runs as.
    pub uid: u32,
    pub version: Version,
    /// The guest's name, if it has one.
    pub name: Option<String>,
    pub uuid: String,
    /// `kvm`, `tcg`, or `other`.
    pub accelerator: String,
    /// Versioned machine type.
    pub machine: String,
    pub backends: Vec<MemoryBackend>,
    /// Whether the guest can return memory to the host (balloon, virtio-mem).
    pub gives_back: bool,
    /// The reasons that prevent protecting the guest. Empty: it can be protected.
    pub obstacles: Vec<Obstacle>,
}

impl Adopted {
    /// The QEMU's process number and start time, which together identify it.
    pub fn process(&self) -> Process {
        Process { pid: self.pid, started: self.started }
    }
}

/// Inspects the QEMU whose QMP socket is `socket`. The guest is not touched.
///
/// On success: the description of the QEMU, and the connection.
///
/// # Errors
/// [`AdoptError`], also when the process cannot be identified for certain.
pub fn adopt(socket: &Path, timeout: Duration) -> Result<(Adopted, Qmp), AdoptError> {
    adopt_connected(Qmp::connect(socket, timeout)?, Some(socket))
}

/// Inspects the QEMU at the other end of an open connection. Without a socket (a manager passes commands on), the
/// process is found by the threads of its virtual CPUs.
///
/// # Errors
/// [`AdoptError`], as for [`adopt`].
pub fn adopt_connected(mut qmp: Qmp, socket: Option<&Path>) -> Result<(Adopted, Qmp), AdoptError> {
    let process = find_process(&mut qmp, socket)?;
    let unreadable = |source| AdoptError::Process { pid: process.pid, source };
    let Program { start: binary, arguments, .. } = Program::of(process).map_err(unreadable)?;
    let uid = fs::metadata(format!("/proc/{}", process.pid)).map_err(unreadable)?.uid();

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
    let is_nil = uuid.bytes().all(|byte| byte == b'0' || byte == b'-');
    let names_uuid = arguments.iter().any(|argument| argument.eq_ignore_ascii_case(&uuid));
    if socket.is_none() && !is_nil && !names_uuid {
        // The thread numbers are of another PID namespace and mean other threads in ours.
        return Err(AdoptError::Other { pid: process.pid, socket: MANAGER_MONITOR.into() });
    }
    let machine: String = qmp.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
    let backends = qmp.execute("query-memdev", ())?;
    let accelerator = query_accelerator(&mut qmp)?;
    let objects = obstacle::list_objects(&mut qmp)?;
    let obstacles = obstacle::find_all(&mut qmp, process, &objects)?;
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
        gives_back: objects.iter().any(|object| obstacle::gives_back(&object.kind)),
        obstacles,
    };
    Ok((adopted, qmp))
}

/// Finds the process of the QEMU that answers, and proves by the threads of its virtual CPUs that it is the one.
fn find_process(qmp: &mut Qmp, socket: Option<&Path>) -> Result<Process, AdoptError> {
    // Ask the kernel which process listens before sending anything to a process that may not be a QEMU.
    let listener = socket.map(|socket| peer::find_by_socket(qmp, socket)).transpose()?;
    let threads = cpu_threads(qmp)?;
    let process = match listener {
        Some(process) => process,
        None => peer::find_by_threads(&threads, qmp.version())?,
    };
    let has_threads =
        has_threads(process, &threads).map_err(|source| AdoptError::Process { pid: process.pid, source })?;
    if !has_threads {
        let socket = socket.unwrap_or(Path::new(MANAGER_MONITOR)).to_owned();
        return Err(AdoptError::Other { pid: process.pid, socket });
    }
    Ok(process)
}

/// Returns the thread numbers of the virtual CPUs, as QEMU reports them.
fn cpu_threads(qmp: &mut Qmp) -> Result<BTreeSet<u32>, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Cpu {
        thread_id: u32,
    }
    let cpus: Vec<Cpu> = qmp.execute("query-cpus-fast", ())?;
    Ok(cpus.into_iter().map(|cpu| cpu.thread_id).collect())
}

/// Returns whether `process` has all these threads, by their numbers in its own PID namespace.
fn has_threads(process: Process, threads: &BTreeSet<u32>) -> io::Result<bool> {
    let mut own_threads = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{}/task", process.pid))? {
        // A thread may end between the listing and the reading.
        let Ok(status) = fs::read_to_string(entry?.path().join("status")) else { continue };
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        own_threads.extend(numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse::<u32>().ok()));
    }
    Ok(!threads.is_empty() && threads.is_subset(&own_threads) && process.is_alive())
}

/// Returns the accelerator: `kvm`, `tcg`, or `other`.
fn query_accelerator(qmp: &mut Qmp) -> Result<String, QmpError> {
    match qmp.execute::<Value>("query-accelerators", ()) {
        Ok(accelerators) => {
            let enabled = accelerators.get("enabled").and_then(Value::as_str).unwrap_or_default();
            return Ok(if ["kvm", "tcg"].contains(&enabled) { enabled } else { "other" }.into());
        }
        // QEMU before 10.2 does not have the command.
        Err(QmpError::Refused { .. }) => {}
        Err(e) => return Err(e),
    }
    let kvm: Value = qmp.execute("query-kvm", ())?;
    if kvm.get("enabled").and_then(Value::as_bool) == Some(true) {
        return Ok("kvm".into());
    }
    // Under any accelerator other than TCG, `info jit` returns an error.
    let text = qmp.human("info jit")?;
    Ok(if text.contains("only available") || text.contains("unknown command") { "other" } else { "tcg" }.into())
}
