//! VMs whose QEMU Rekindle did not start: attach and detach.
//!
//! Attaching only writes a run directory: neither QEMU nor its guest is changed. A protector changes QEMU (a
//! userfaultfd, protected pages, a set of descriptors). Detaching removes what is left of these changes, even if the
//! protector was killed.

use crate::cleanup::clean_up;
use crate::definition::{
    Accel, Bytes, Definition, Devices, Mac, Name, Net, NetBackend, OnCrash, OnReboot, Phase, Ram, Span,
};
use crate::error::LifeError;
use crate::host::Host;
use crate::life::Held;
use crate::lock::{Lock, RunState};
use crate::rundir::RunDir;
use crate::state::{Attached, State, format_of};
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::RemoteError;
use rekindle_memory::tracker;
use rekindle_qemu::adopt::{AdoptError, Adopted, Obstacle};
use rekindle_qemu::command::{self, ForeignMachine, ForeignNetwork, Hardware};
use rekindle_qemu::devices::{DescriptorSets, remove_descriptor_sets};
use rekindle_qemu::foreign;
use rekindle_qemu::guest;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::userfaultfd;
use rekindle_qemu::vmm::{Vmm, VmmError};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Limit for a QEMU's greeting.
const GREETING: Duration = Duration::from_secs(5);
/// How long to wait for the end of a checkpoint.
const PAUSE: Duration = Duration::from_secs(30);

/// Why a QEMU could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The VM is unknown, busy, or its files cannot be used.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The QEMU cannot be found or inspected.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// QEMU rejects a command or does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The QEMU belongs to another VM.
    #[error("process {pid} is VM {other} already: {}", if *.attached {
        format!("rekindle detach {other} releases it")
    } else {
        "Rekindle has started it itself, and it needs no attaching".to_owned()
    })]
    Same {
        /// QEMU's process number.
        pid: u32,
        /// The other VM.
        other: String,
        /// Whether the other VM is an attached one.
        attached: bool,
    },
    /// The guest cannot be protected, or could not be restored.
    #[error("process {pid} cannot be attached to:\n{}", listed(.obstacles))]
    Obstacles {
        /// QEMU's process number.
        pid: u32,
        /// The reasons.
        obstacles: Vec<Obstacle>,
    },
    /// No system call can be injected into QEMU.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// The guest's memory cannot be tracked.
    #[error(transparent)]
    Right(#[from] RemoteError),
    /// Rekindle started the VM.
    #[error("VM {name} was started by Rekindle, and not attached to: rekindle stop {name}")]
    NotAttached {
        /// Name of the VM.
        name: String,
    },
    /// A protector takes checkpoints of the VM.
    #[error("{} takes checkpoints of VM {name}: end it first", .by.map_or("a process".to_owned(), |pid| format!("process {pid}")))]
    Protected {
        /// Name of the VM.
        name: String,
        /// The protector's process number, if it is known.
        by: Option<u32>,
    },
    /// A file of the run directory cannot be used.
    #[error("{}", path.display())]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// The error of opening, locking or writing it.
        #[source]
        source: io::Error,
    },
}

fn listed(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|one| format!("  - {}: {}", one.what, one.why)).collect::<Vec<_>>().join("\n")
}

/// Lock of an attached VM's protector. There is only one protector at a time: the monitor serves one client, and the
/// changes in QEMU belong to one protector.
#[derive(Debug)]
pub struct Protection {
    _file: File,
}

impl Protection {
    /// Takes the lock without waiting.
    ///
    /// # Errors
    /// [`AttachError::Protected`] when another protector holds it.
    pub fn take(rundir: &RunDir) -> Result<Self, AttachError> {
        let path = rundir.protection_lock();
        let failed = |source| AttachError::File { path: path.clone(), source };
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let by = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
                return Err(AttachError::Protected { name: rundir.name().into(), by });
            }
            Err(e) => return Err(failed(e.into())),
        }
        fs::write(&path, std::process::id().to_string()).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

/// Attaches the QEMU that `monitor` belongs to, as VM `name`.
///
/// *Needs:* the right to trace QEMU (root, or QEMU's user with `kernel.yama.ptrace_scope=0`); a guest that can be
/// protected and restored. *On success:* the VM has a run directory; neither QEMU nor its guest was changed. *On
/// failure:* a new run directory is removed again.
///
/// # Errors
/// [`AttachError`]; it lists every obstacle.
pub fn attach(host: &Host, name: &Name, monitor: Monitor) -> Result<State, AttachError> {
    let rundir = RunDir::new(&host.root, name.as_str());
    let failed = |source| AttachError::File { path: rundir.path().to_owned(), source };
    // Another process may attach the same QEMU under another name: lock the root directory.
    let all_vms = File::open(&host.root).map_err(failed)?;
    flock(&all_vms, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
    let was_there = rundir.exists();
    host.create_run_dir(&rundir).map_err(failed)?;
    let made = Lock::acquire(&rundir, "attach").map_err(LifeError::from).map_err(AttachError::from).and_then(|lock| {
        let state = make(host, &rundir, name, monitor)?;
        drop(lock);
        Ok(state)
    });
    if made.is_err() && !was_there {
        let _ = rundir.remove();
    }
    made
}

fn make(host: &Host, rundir: &RunDir, name: &Name, monitor: Monitor) -> Result<State, AttachError> {
    let failed = |source| AttachError::File { path: rundir.path().to_owned(), source };
    if let Some(before) = State::read(rundir).map_err(failed)? {
        match before.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
            Some(vmm) => return Err(LifeError::Running { name: name.to_string(), pid: vmm.pid }.into()),
            None if before.attached.is_some() => {
                clean_up(host, rundir, &before)?;
                host.create_run_dir(rundir).map_err(failed)?;
            }
            // A VM that Rekindle started: the user may want to run it again.
            None => return Err(LifeError::NameTaken { name: name.to_string() }.into()),
        }
    }
    let monitor = match monitor {
        Monitor::Socket { path } => Monitor::Socket { path: std::path::absolute(path).map_err(failed)? },
        other @ Monitor::Libvirt { .. } => other,
    };
    let (adopted, mut qmp) = monitor.adopt(GREETING)?;
    other_name(host, &adopted)?;
    let pid = adopted.pid;
    let mut obstacles = adopted.obstacles.clone();
    if !["kvm", "tcg"].contains(&adopted.accelerator.as_str()) {
        let why = "neither KVM nor TCG: Rekindle cannot start a QEMU like it".into();
        obstacles.push(Obstacle { what: "its accelerator".into(), why });
    }
    let state = match foreign::describe(&adopted, &mut qmp)? {
        Ok(foreign::Description { machine, vm_generation }) if obstacles.is_empty() => {
            state(rundir, name, &adopted, machine, vm_generation, &monitor, processors(&mut qmp)?)
        }
        Ok(_) => return Err(AttachError::Obstacles { pid, obstacles }),
        Err(more) => {
            obstacles.extend(more);
            return Err(AttachError::Obstacles { pid, obstacles });
        }
    };
    prove(&adopted, &mut qmp)?;
    state.write(rundir).map_err(failed)?;
    Ok(state)
}

/// Checks that our rights suffice: opens a userfaultfd in QEMU and closes it again.
fn prove(adopted: &Adopted, qmp: &mut Qmp) -> Result<(), AttachError> {
    let injector = Injector::new(adopted.process())?;
    let device = userfaultfd::hand(qmp, adopted.process())?;
    let tried = tracker::check_userfaultfd(injector, device);
    userfaultfd::take_back(qmp)?;
    Ok(tried?)
}

/// Rejects a QEMU that is already another VM.
fn other_name(host: &Host, adopted: &Adopted) -> Result<(), AttachError> {
    for other in RunDir::list(&host.root).unwrap_or_default() {
        let Ok(Some(state)) = State::read(&RunDir::new(&host.root, &other)) else { continue };
        if state.vmm.is_some_and(|vmm| vmm.process() == adopted.process()) {
            return Err(AttachError::Same { pid: adopted.pid, other, attached: state.attached.is_some() });
        }
    }
    Ok(())
}

fn processors(qmp: &mut Qmp) -> Result<u32, QmpError> {
    let all: Vec<Value> = qmp.execute("query-cpus-fast", ())?;
    Ok(all.len() as u32)
}

fn state(
    rundir: &RunDir,
    name: &Name,
    adopted: &Adopted,
    foreign: ForeignMachine,
    generation: Option<Uuid>,
    monitor: &Monitor,
    vcpus: u32,
) -> State {
    let bytes = foreign.backends.iter().map(|backend| backend.bytes).sum();
    let cpu = foreign.arguments.iter().zip(foreign.arguments.iter().skip(1)).find(|(option, _)| *option == "-cpu");
    let cpu = cpu.map(|(_, model)| model.clone()).unwrap_or_default();
    let mac = |network: &ForeignNetwork| match network.mac.parse() {
        Ok(mac) => mac,
        Err(_) => Mac::derived(name.as_str(), &network.id),
    };
    let binary = adopted.binary.clone();
    let backend = NetBackend::User { forward: Vec::new() };
    let definition = Definition {
        name: name.clone(),
        memory: Bytes::new(bytes),
        vcpus: vcpus.try_into().unwrap_or(u8::MAX),
        accel: if adopted.accelerator == "kvm" { Accel::Kvm } else { Accel::Tcg },
        machine: adopted.machine.clone(),
        cpu: if cpu.is_empty() { "auto".into() } else { cpu.clone() },
        qemu: binary.clone(),
        probe: None,
        shutdown_timeout: Span::from_secs(60),
        on_reboot: OnReboot::Reset,
        on_crash: OnCrash::Leave,
        save_dir: None,
        qemu_args: Vec::new(),
        ram: Ram::default(),
        boot: None,
        devices: Devices { vga: false, agent: foreign.agent.is_some(), rng: false, vmgenid: generation.is_some() },
        phase: Phase::default(),
        disks: Vec::new(),
        nets: foreign
            .networks
            .iter()
            .map(|network| Net { id: network.id.clone(), mac: mac(network), backend: backend.clone() })
            .collect(),
    };
    let net = |network: &ForeignNetwork| command::Net {
        id: network.id.clone(),
        mac: network.mac.clone(),
        backend: command::NetBackend::User(network.forwards.clone()),
    };
    let uuid = adopted.uuid.parse().ok().filter(|uuid: &Uuid| !uuid.is_nil()).unwrap_or_else(|| own_uuid(adopted));
    let hardware = Hardware {
        name: name.to_string(),
        uuid: Some(uuid),
        machine: adopted.machine.clone(),
        cpu,
        accel: adopted.accelerator.clone(),
        vcpus,
        ram: command::Ram { path: PathBuf::new(), bytes, prealloc: false },
        boot: None,
        disks: Vec::new(),
        nets: foreign.networks.iter().map(net).collect(),
        vga: false,
        agent: foreign.agent.is_some(),
        agent_ports: None,
        phase: false,
        panic: false,
        rng: false,
        vm_generation: generation,
        extra: Vec::new(),
        foreign: Some(foreign),
    };
    let vmm = Vmm {
        binary,
        pid: adopted.pid,
        started: adopted.started,
        directory: rundir.vmm(1).0,
        monitor: Some(monitor.clone()),
    };
    State {
        format: format_of(&hardware),
        definition,
        hardware,
        generation: 1,
        vmm: Some(vmm),
        version: Some(adopted.version.clone()),
        previous: None,
        prepared: None,
        attached: Some(Attached { uid: adopted.uid, starter: starter(adopted, monitor) }),
    }
}

/// Returns the UUID by which a store identifies a guest without a UUID: the same each time the process is attached.
fn own_uuid(adopted: &Adopted) -> Uuid {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let life = format!("{} {} {}", boot.trim(), adopted.pid, adopted.started);
    Uuid::from_u128(xxhash_rust::xxh3::xxh3_128(life.as_bytes()))
}

/// Describes the program that started QEMU, as far as that is visible.
fn starter(adopted: &Adopted, monitor: &Monitor) -> String {
    if let Monitor::Libvirt { .. } = monitor {
        return monitor.to_string();
    }
    let status = fs::read_to_string(format!("/proc/{}/status", adopted.pid)).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
    let program = parent.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    match (parent, program) {
        (Some(pid), Some(program)) if pid > 1 => format!("by {} (process {pid}), user {}", program.trim(), adopted.uid),
        _ => format!("by user {}", adopted.uid),
    }
}

/// QEMU's state when it was detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    /// QEMU continues to run.
    Running,
    /// QEMU had ended.
    Ended,
}

/// Detaches an attached VM and removes what a protector has left in its QEMU.
///
/// *Needs:* no running protector. *On success:* nothing of Rekindle is left in QEMU, the run directory is removed,
/// and the guest continues to run. *On failure:* the error names what could not be removed; the same command can be
/// repeated.
///
/// # Errors
/// [`AttachError`]; also [`AttachError::NotAttached`] for a VM that Rekindle started.
pub fn detach(host: &Host, name: &str) -> Result<Detached, AttachError> {
    let (held, _left_behind) = Held::take_anyhow(host, name, "detach")?;
    if held.state.attached.is_none() {
        return Err(AttachError::NotAttached { name: name.into() });
    }
    let protection = Protection::take(&held.rundir)?;
    let alive = held.state.vmm.as_ref().filter(|vmm| vmm.is_alive());
    if let Some(vmm) = alive {
        let _run_state = RunState::acquire(&held.rundir, PAUSE).map_err(LifeError::from)?;
        match release(vmm, &held.rundir.paused()) {
            // QEMU ended in the meantime.
            Err(_) if !vmm.is_alive() => {}
            other => other?,
        }
    }
    let ended = !alive.is_some_and(Vmm::is_alive);
    drop(protection);
    clean_up(host, &held.rundir, &held.state)?;
    Ok(if ended { Detached::Ended } else { Detached::Running })
}

fn release(vmm: &Vmm, mark: &Path) -> Result<(), AttachError> {
    // First resume the threads that are blocked in a write to a protected page.
    tracker::close_leftovers(Injector::new(Process { pid: vmm.pid, started: vmm.started })?)?;
    let mut qmp = vmm.connect(GREETING).map_err(|e| match e {
        VmmError::Qmp(e) => AttachError::Qmp(e),
        other => LifeError::Vmm(other).into(),
    })?;
    if mark.exists() && run_state(&mut qmp)? == "paused" {
        guest::resume(&mut qmp)?;
    }
    remove_descriptor_sets(&mut qmp, DescriptorSets::All)?;
    userfaultfd::take_back(&mut qmp)?;
    Ok(())
}
