//! VMs whose QEMU Rekindle did not start: attach and detach.
//!
//! Attaching only writes a run directory: neither QEMU nor its guest is changed. A protector changes QEMU (a
//! userfaultfd, protected pages, a set of descriptors). Detaching removes what is left of these changes, even if the
//! protector was killed.

use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_kernel::process::Process;
use rekindle_kernel::process::boot_id;
use rekindle_kernel::sched;
use rekindle_kernel::userfault::remote::RemoteError;
use rekindle_memory::tracker;
use rekindle_qemu::adopt::{AdoptError, Adopted, Obstacle};
use rekindle_qemu::command::{self, ForeignMachine, ForeignNetwork, Hardware};
use rekindle_qemu::devices::DeviceStateError;
use rekindle_qemu::foreign;
use rekindle_qemu::guest;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::{Vmm, VmmError};
use rekindle_qemu::{devices, piped_save, userfaultfd};
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::definition::{
    Accel, Bytes, Definition, Devices, Mac, Name, Net, NetBackend, OnCrash, OnReboot, Phase, Ram, Span,
};
use rekindle_vm::direct_monitors;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::lock::{OperationLock, RunStateLock};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::overlays::{OverlayDisks, OverlayDisksError};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::{Attached, State, format_of};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;
use uuid::Uuid;

const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for the end of a checkpoint.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(30);

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
    #[error("process {pid} cannot be attached to:\n{}", list(.obstacles))]
    Obstacles {
        /// QEMU's process number.
        pid: u32,
        /// The reasons.
        obstacles: Vec<Obstacle>,
    },
    /// No system call can be injected into QEMU.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// What protectors have left in QEMU cannot be closed.
    #[error(transparent)]
    Leftovers(#[from] DeviceStateError),
    /// The guest's memory cannot be tracked.
    #[error(transparent)]
    Right(#[from] RemoteError),
    /// The overlays on its disks cannot be merged.
    #[error("the overlays on the guest's disks cannot be merged; repeat `rekindle detach`, or see the cause")]
    Overlays(#[from] OverlayDisksError),
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
    /// Without the run directory, nothing would load the rest of its memory.
    #[error(
        "the memory of VM {name} is still being loaded from its checkpoint: repeat this later; to load it if nothing does: \
         rekindle recover {name}"
    )]
    Filling {
        /// Name of the VM.
        name: String,
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

fn list(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|obstacle| format!("  - {}: {}", obstacle.what, obstacle.why)).collect::<Vec<_>>().join("\n")
}

/// Lock of an attached VM's protector. There is only one protector at a time: the monitor serves one client, and the
/// changes in QEMU belong to one protector.
#[derive(Debug)]
pub struct ProtectionLock {
    _file: File,
}

impl ProtectionLock {
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
    let existed_before = rundir.exists();
    host.create_run_dir(&rundir).map_err(failed)?;
    let attached = attach_in(host, &rundir, name, monitor);
    if attached.is_err() && !existed_before {
        let _ = rundir.remove();
    }
    attached
}

/// Attaches a QEMU as the VM of a run directory that exists.
fn attach_in(host: &Host, rundir: &RunDir, name: &Name, monitor: Monitor) -> Result<State, AttachError> {
    let _lock = OperationLock::acquire(rundir, "attach").map_err(LifeError::from)?;
    remove_ended_vm(host, rundir, name)?;
    attach_locked(host, rundir, name, monitor)
}

/// Attaches a QEMU as the VM of a run directory, whose lock the caller holds. Its guest may be paused.
///
/// # Errors
/// [`AttachError`]; it lists every obstacle.
pub fn attach_locked(host: &Host, rundir: &RunDir, name: &Name, monitor: Monitor) -> Result<State, AttachError> {
    let failed = |source| AttachError::File { path: rundir.path().to_owned(), source };
    let monitor = match monitor {
        Monitor::Socket { path } => Monitor::Socket { path: std::path::absolute(path).map_err(failed)? },
        libvirt @ Monitor::Libvirt { .. } => libvirt,
    };
    let (adopted, mut qmp) = monitor.adopt(GREETING_TIMEOUT)?;
    reject_qemu_of_other_vm(host, &adopted)?;
    let foreign::Description { machine: foreign, vm_generation: generation } =
        inspect_guest(&adopted, &monitor, &mut qmp)?;
    let vcpus = count_processors(&mut qmp)?;
    check_tracking(adopted.process(), &mut qmp)?;
    let domain_xml = match monitor {
        Monitor::Libvirt { .. } => Some(rekindle_qemu::libvirt::portable_xml(&mut qmp)?),
        Monitor::Socket { .. } => None,
    };
    let foreign = Some(ForeignMachine { domain_xml, ..foreign });
    let guest = AdoptedGuest { adopted: &adopted, foreign, generation, monitor: &monitor, vcpus };
    let state = guest.into_state(rundir, name);
    state.write(rundir).map_err(failed)?;
    Ok(state)
}

/// Removes an attached VM of the name whose QEMU has ended. Rejects any other VM of the name.
fn remove_ended_vm(host: &Host, rundir: &RunDir, name: &Name) -> Result<(), AttachError> {
    let failed = |source| AttachError::File { path: rundir.path().to_owned(), source };
    let Some(state) = State::read(rundir).map_err(failed)? else { return Ok(()) };
    if let Some(vmm) = state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
        return Err(LifeError::Running { name: name.to_string(), pid: vmm.pid }.into());
    }
    if state.attached.is_none() {
        // A VM that Rekindle started: the user may want to run it again.
        return Err(LifeError::NameTaken { name: name.to_string() }.into());
    }
    clean_up(host, rundir, &state)?;
    host.create_run_dir(rundir).map_err(failed)
}

/// Returns the guest's hardware and its VM generation ID. The error lists every obstacle to protecting it.
fn inspect_guest(adopted: &Adopted, monitor: &Monitor, qmp: &mut Qmp) -> Result<foreign::Description, AttachError> {
    let mut obstacles = adopted.obstacles.clone();
    if !["kvm", "tcg"].contains(&adopted.accelerator.as_str()) {
        let why = "neither KVM nor TCG: Rekindle cannot start a QEMU like it".into();
        obstacles.push(Obstacle { what: "its accelerator".into(), why });
    }
    let description = foreign::describe(adopted, qmp)?;
    let has_tpm_emulator = description.as_ref().is_ok_and(|description| description.machine.has_tpm_emulator);
    if has_tpm_emulator && !matches!(monitor, Monitor::Libvirt { .. }) {
        let why = "only libvirt can start the emulator of a restored guest: start the guest without a TPM, or name its domain \
                   (--libvirt)".into();
        obstacles.push(Obstacle { what: "its TPM".into(), why });
    }
    match description {
        Ok(hardware) if obstacles.is_empty() => return Ok(hardware),
        Ok(_) => {}
        Err(further) => obstacles.extend(further),
    }
    Err(AttachError::Obstacles { pid: adopted.pid, obstacles })
}

/// Checks that the memory of this QEMU can be tracked, by this kernel and with our rights: opens a userfaultfd in QEMU and
/// closes it again.
///
/// # Errors
/// [`AttachError`]; it names the missing permission, or the version of Linux.
pub fn check_tracking(qemu: Process, qmp: &mut Qmp) -> Result<(), AttachError> {
    let injector = Injector::new(qemu)?;
    let device = userfaultfd::hand(qmp, qemu)?;
    let checked = tracker::check_userfaultfd(injector, device);
    userfaultfd::take_back(qmp)?;
    Ok(checked?)
}

/// Rejects a QEMU that is already another VM.
fn reject_qemu_of_other_vm(host: &Host, adopted: &Adopted) -> Result<(), AttachError> {
    for other in RunDir::list(&host.root).unwrap_or_default() {
        let Ok(Some(state)) = State::read(&RunDir::new(&host.root, &other)) else { continue };
        if state.vmm.is_some_and(|vmm| vmm.process() == adopted.process()) {
            return Err(AttachError::Same { pid: adopted.pid, other, attached: state.attached.is_some() });
        }
    }
    Ok(())
}

fn count_processors(qmp: &mut Qmp) -> Result<u32, QmpError> {
    let processors: Vec<Value> = qmp.execute("query-cpus-fast", ())?;
    Ok(processors.len() as u32)
}

/// What is known of a guest whose QEMU Rekindle did not start.
#[derive(Debug)]
pub struct AdoptedGuest<'a> {
    /// Its QEMU.
    pub adopted: &'a Adopted,
    /// `None` for a guest that cannot be restored from a checkpoint.
    pub foreign: Option<ForeignMachine>,
    /// Its VM generation ID.
    pub generation: Option<Uuid>,
    /// How to reach its QEMU.
    pub monitor: &'a Monitor,
    /// Number of its virtual processors.
    pub vcpus: u32,
}

impl AdoptedGuest<'_> {
    /// Returns the state of the VM that the guest is for Rekindle.
    #[must_use]
    pub fn into_state(self, rundir: &RunDir, name: &Name) -> State {
        let definition = self.definition(name);
        let Self { adopted, monitor, .. } = self;
        let direct_monitors = match monitor {
            Monitor::Libvirt { .. } => {
                rundir.path().parent().and_then(|root| direct_monitors::find(root, adopted.process()))
            }
            Monitor::Socket { .. } => None,
        };
        let vmm = Vmm {
            binary: adopted.binary.clone(),
            pid: adopted.pid,
            started: adopted.started,
            directory: rundir.vmm(1).0,
            monitor: Some(monitor.clone()),
            direct_monitors,
        };
        let hardware = self.into_hardware(name);
        State {
            format: format_of(&hardware),
            definition,
            hardware,
            generation: 1,
            vmm: Some(vmm),
            version: Some(adopted.version.clone()),
            previous: None,
            prepared: None,
            attached: Some(Attached { uid: adopted.uid, starter: describe_starter(adopted, monitor) }),
        }
    }

    fn ram_bytes(&self) -> u64 {
        self.adopted.backends.iter().map(|backend| backend.size).sum()
    }

    /// Returns the CPU model in QEMU's command line; empty if it names none.
    fn cpu_model(&self) -> String {
        let words = self.foreign.as_ref().map_or(&self.adopted.arguments, |foreign| &foreign.arguments);
        let option = words.iter().position(|word| word == "-cpu");
        option.and_then(|index| words.get(index + 1)).cloned().unwrap_or_default()
    }

    /// Returns a definition with what a definition can express of the guest.
    fn definition(&self, name: &Name) -> Definition {
        let adopted = self.adopted;
        let cpu = self.cpu_model();
        let net = |network: &ForeignNetwork| Net {
            id: network.id.clone(),
            mac: network.mac.parse().unwrap_or_else(|_| Mac::derived(name.as_str(), &network.id)),
            backend: NetBackend::User { forward: Vec::new() },
        };
        Definition {
            name: name.clone(),
            memory: Bytes::new(self.ram_bytes()),
            vcpus: self.vcpus.try_into().unwrap_or(u8::MAX),
            accel: if adopted.accelerator == "kvm" { Accel::Kvm } else { Accel::Tcg },
            machine: adopted.machine.clone(),
            cpu: if cpu.is_empty() { "auto".into() } else { cpu },
            qemu: adopted.binary.clone(),
            probe: None,
            shutdown_timeout: Span::from_secs(60),
            on_reboot: OnReboot::Reset,
            on_crash: OnCrash::Leave,
            save_dir: None,
            qemu_args: Vec::new(),
            ram: Ram::default(),
            boot: None,
            devices: Devices {
                vga: false,
                agent: self.foreign.as_ref().is_some_and(|foreign| foreign.agent.is_some()),
                rng: false,
                vmgenid: self.generation.is_some(),
            },
            phase: Phase::default(),
            disks: Vec::new(),
            nets: self.networks().iter().map(net).collect(),
        }
    }

    fn networks(&self) -> &[ForeignNetwork] {
        self.foreign.as_ref().map_or(&[], |foreign| &foreign.networks)
    }

    fn into_hardware(self, name: &Name) -> Hardware {
        let (cpu, ram_bytes) = (self.cpu_model(), self.ram_bytes());
        let net = |network: &ForeignNetwork| command::Net {
            id: network.id.clone(),
            mac: network.mac.clone(),
            backend: command::NetBackend::User(network.forwards.clone()),
        };
        let nets = self.networks().iter().map(net).collect();
        let Self { adopted, foreign, generation, vcpus, .. } = self;
        let uuid = adopted.uuid.parse().ok().filter(|uuid: &Uuid| !uuid.is_nil());
        Hardware {
            name: name.to_string(),
            uuid: Some(uuid.unwrap_or_else(|| uuid_of_process(adopted))),
            machine: adopted.machine.clone(),
            cpu,
            accel: adopted.accelerator.clone(),
            vcpus,
            ram: command::Ram { path: PathBuf::new(), bytes: ram_bytes, prealloc: false },
            boot: None,
            disks: Vec::new(),
            nets,
            vga: false,
            agent: foreign.as_ref().is_some_and(|foreign| foreign.agent.is_some()),
            agent_ports: None,
            phase: false,
            panic: false,
            rng: false,
            vm_generation: generation,
            extra: Vec::new(),
            foreign,
        }
    }
}

/// Returns the UUID by which a store identifies a guest without a UUID: the same each time the process is attached.
fn uuid_of_process(adopted: &Adopted) -> Uuid {
    let process = format!("{} {} {}", boot_id().unwrap_or_default(), adopted.pid, adopted.started);
    Uuid::from_u128(xxhash_rust::xxh3::xxh3_128(process.as_bytes()))
}

/// Describes the program that started QEMU, as far as that is visible.
fn describe_starter(adopted: &Adopted, monitor: &Monitor) -> String {
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
/// *Needs:* no running protector; all of the guest's memory is loaded. *On success:* nothing of Rekindle is left in QEMU,
/// the run directory is removed, and the guest continues to run. *On failure:* the error names what could not be removed;
/// the same command can be repeated.
///
/// # Errors
/// [`AttachError`]; also [`AttachError::NotAttached`] for a VM that Rekindle started.
pub fn detach(host: &Host, name: &str) -> Result<Detached, AttachError> {
    let (vm, _interrupted) = LockedVm::lock_even_if_interrupted(host, name, "detach")?;
    if vm.state.attached.is_none() {
        return Err(AttachError::NotAttached { name: name.into() });
    }
    if is_filling(&vm.rundir) {
        return Err(AttachError::Filling { name: name.into() });
    }
    let protection = ProtectionLock::take(&vm.rundir)?;
    let mut detached = Detached::Ended;
    if let Some(vmm) = vm.state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
        let _run_state = RunStateLock::acquire(&vm.rundir, CHECKPOINT_TIMEOUT).map_err(LifeError::from)?;
        let released = release_qemu(vmm, &vm.rundir);
        // An error of a QEMU that has ended in the meantime does not matter.
        if vmm.is_alive() {
            released?;
            detached = Detached::Running;
        }
    }
    drop(protection);
    clean_up(host, &vm.rundir, &vm.state)?;
    Ok(detached)
}

/// Returns whether a restore of the running guest has not loaded all of its memory.
fn is_filling(rundir: &RunDir) -> bool {
    let is_alive = |state: State| state.vmm.is_some_and(|vmm| vmm.is_alive());
    rundir.fill().exists() && State::read(rundir).ok().flatten().is_some_and(is_alive)
}

/// Removes from a QEMU what a protector has left in it: it may have stopped the guest, and put overlays on its disks.
fn release_qemu(vmm: &Vmm, rundir: &RunDir) -> Result<(), AttachError> {
    // First resume the threads that are blocked in a write to a protected page.
    let injector = Injector::new(vmm.process())?;
    tracker::close_leftovers(injector)?;
    if rundir.piped_pause().exists()
        && let Err(e) = sched::normal(vmm.process())
    {
        tracing::debug!("cannot reset the priority of QEMU's threads: {e}");
    }
    let mut qmp = vmm.connect(GREETING_TIMEOUT).map_err(|e| match e {
        VmmError::Qmp(e) => AttachError::Qmp(e),
        no_qmp_error => LifeError::Vmm(no_qmp_error).into(),
    })?;
    piped_save::close_leftovers(&mut qmp, injector)?;
    // Must precede the resume: an earlier detach may have been killed while it merged them.
    let overlays = OverlayDisks::adopt(&mut qmp, rundir, vmm)?;
    if rundir.paused().exists() && run_state(&mut qmp)? == "paused" {
        guest::resume(&mut qmp)?;
        fs::remove_file(rundir.paused()).map_err(|source| AttachError::File { path: rundir.paused(), source })?;
    }
    if let Some(overlays) = overlays {
        overlays.end(&mut qmp, rundir)?;
    }
    devices::remove_descriptor_sets(&mut qmp, devices::DescriptorSets::All)?;
    userfaultfd::take_back(&mut qmp)?;
    Ok(())
}
