//! Kexec: the guest's kernel starts the guest's default kernel, without firmware and boot loader (section 3.1 of the
//! evaluation).
//!
//! The guest does all of this itself, requested through its agent: its own `kexec` program loads the kernel while
//! everything runs, then its systemd shuts down cleanly and enters the kernel. QEMU sees no reset and stays. The boot
//! ID proves that another kernel runs. `docs/os-reboot.md` has the sequence.

use super::OsRebootReport;
use crate::error::{Failure, Problem, RebootError};
use crate::vmm::{QemuInfo, RebootReport};
use rekindle_qemu::agent::{self, ExecError};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::causes::with_causes;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, Journal, Kind, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::qemu::ENDED_RUN_STATES;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

const OPERATION: &str = "reboot --how kexec";
/// Script, run in the guest, that finds and loads the kernel.
const LOAD_SCRIPT: &str = include_str!("kexec.sh");
/// How long [`LOAD_SCRIPT`] may take: it reads kernel and RAM disk from a disk that may be slow.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long an agent may take for a short command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the new kernel may take, from the end of the previous kernel until the new one's agent answers.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);
/// A guest whose agent answers for this long, in the same boot, has ignored the request to shut down.
const IGNORED_AFTER: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The kernel to load. All paths are paths in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KexecRequest {
    /// `None`: the guest's default kernel.
    pub kernel: Option<String>,
    /// Initial RAM disk; `none`: no RAM disk. `None`: the RAM disk that belongs to the kernel.
    pub initrd: Option<String>,
}

/// The kernel that was loaded. All paths are paths in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedKernel {
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
}

/// Reboots the guest of VM `name` by kexec.
///
/// *Needs:* qemu-guest-agent that may run programs, systemd and `kexec` in the guest; no other operation on the VM.
/// *On success:* another kernel runs, and its agent answers. QEMU is still the same process.
/// *On failure:* [`Failure::guest`] states whether the guest runs.
pub(super) fn reboot(host: &Host, name: &str, request: &KexecRequest) -> Result<OsRebootReport, Failure> {
    let mut recorder = Recorder::new(name, OPERATION);
    let locked_vm = LockedVm::lock_after_phase_save(host, name, OPERATION).map_err(Failure::unchanged)?;
    let prepared = prepare(&locked_vm, request, &mut recorder).map_err(Failure::unchanged)?;
    let journal = prepared.open_journal(&locked_vm).map_err(Failure::unchanged)?;
    fault::point("kexec.prepare.journalled", Some(&prepared.vmm), None);
    prepared.execute(&locked_vm, journal, recorder)
}

/// Checks that the guest of VM `name` can be asked to reboot by kexec. Loads nothing.
pub(super) fn check(host: &Host, name: &str, operation: &str) -> Result<(), Failure> {
    let locked_vm = LockedVm::lock_after_phase_save(host, name, operation).map_err(Failure::unchanged)?;
    check_guest(&locked_vm).map(drop).map_err(Failure::unchanged)
}

/// A running guest that can be asked to start another kernel.
struct RunningGuest {
    vmm: Vmm,
    qmp: Qmp,
    boot_id: String,
}

/// A running guest with the next kernel loaded.
struct PreparedKexec {
    vmm: Vmm,
    qmp: Qmp,
    /// ID of the boot that is to end.
    old_boot_id: String,
    loaded: LoadedKernel,
}

fn prevented(locked_vm: &LockedVm, why: impl Into<String>) -> RebootError {
    RebootError::Prevented { name: locked_vm.rundir.name().into(), problem: Problem(why.into()) }
}

/// Converts an agent's error, and adds another method as the remedy.
fn agent_unable(locked_vm: &LockedVm, error: &ExecError) -> RebootError {
    prevented(locked_vm, format!("{}; or use --how cold", with_causes(error)))
}

/// Runs all checks that can fail before a kernel is loaded.
fn check_guest(locked_vm: &LockedVm) -> Result<RunningGuest, RebootError> {
    let vmm = locked_vm.vmm()?.clone();
    locked_vm.refuse_attached("rebooting its guest")?;
    if !locked_vm.state.hardware.agent {
        let why = "it has no port for the agent that would start the kernel; remove agent = false under [devices] and \
                   restart the VM, or use --how cold";
        return Err(prevented(locked_vm, why));
    }
    let mut qmp = vmm.connect(vmm::START_TIMEOUT)?;
    let state = run_state(&mut qmp)?;
    if state != "running" {
        return Err(prevented(locked_vm, format!("its guest does not run (QEMU reports `{state}`); use --how cold")));
    }
    let port = vmm.directory().agent();
    let boot_id = agent::boot_id(&port, ANSWER_TIMEOUT).map_err(|e| agent_unable(locked_vm, &e))?;
    Ok(RunningGuest { vmm, qmp, boot_id })
}

/// Runs the checks and loads the kernel, which does not disturb the guest.
fn prepare(
    locked_vm: &LockedVm,
    request: &KexecRequest,
    recorder: &mut Recorder,
) -> Result<PreparedKexec, RebootError> {
    let RunningGuest { vmm, qmp, boot_id } = check_guest(locked_vm)?;
    recorder.step("ask its agent");
    let kernel = request.kernel.as_deref().unwrap_or_default();
    let initrd = request.initrd.as_deref().unwrap_or_default();
    let arguments = ["-c", LOAD_SCRIPT, "sh", kernel, initrd];
    let script = agent::run(&vmm.directory().agent(), "/bin/sh", &arguments, LOAD_TIMEOUT);
    let script = script.map_err(|e| agent_unable(locked_vm, &e))?;
    let loaded_line = script.stdout.lines().find_map(|line| line.strip_prefix("loaded "));
    let Some((kernel, initrd)) = loaded_line.and_then(|line| line.split_once(' ')).filter(|_| script.status == Some(0))
    else {
        let why = load_failure(script.status, kernel, initrd, script.stdout.trim(), script.stderr.trim());
        return Err(prevented(locked_vm, why));
    };
    let loaded = LoadedKernel { kernel: kernel.into(), initrd: (initrd != "none").then(|| initrd.into()) };
    recorder.step("load the kernel");
    Ok(PreparedKexec { vmm, qmp, old_boot_id: boot_id, loaded })
}

/// Describes a failure of [`LOAD_SCRIPT`] by its exit status.
fn load_failure(status: Option<i64>, kernel: &str, initrd: &str, out: &str, err: &str) -> String {
    let why = match status {
        Some(10) => {
            "the guest does not run systemd, which would shut it down cleanly before the new kernel starts".into()
        }
        Some(11) => "the guest has no program `kexec`; install kexec-tools in it".into(),
        Some(12) => "the guest's kernel is built without kexec (CONFIG_KEXEC)".into(),
        Some(13) if kernel.is_empty() => {
            "the guest's default kernel was not found (neither by grubby nor as /boot/vmlinuz, /vmlinuz or that of \
             `uname -r`); set --kernel PATH"
                .into()
        }
        Some(13) => format!("the guest has no kernel {kernel}"),
        Some(14) => format!(
            "the guest has no initial RAM disk next to its kernel {out}; set --initrd PATH, or --initrd none if it \
             needs none"
        ),
        Some(15) => format!("the guest has no initial RAM disk {initrd}"),
        Some(16) => format!(
            "the guest's kernel cannot load another one (lockdown, an unsigned kernel, or \
             kernel.kexec_load_disabled=1): kexec: {err}"
        ),
        status => format!("the guest could not load its kernel (exit status {status:?}): {err}"),
    };
    format!("{why}; or use --how cold")
}

impl PreparedKexec {
    fn open_journal(&self, locked_vm: &LockedVm) -> Result<Journal, RebootError> {
        let failed = journal_error(locked_vm);
        let source = Some(self.vmm.clone());
        let mut journal =
            Journal::open(&locked_vm.rundir, Kind::OsKexec, source, locked_vm.state.generation + 1).map_err(&failed)?;
        journal.operation.boot = Some(self.old_boot_id.clone());
        journal.write().map_err(&failed)?;
        Ok(journal)
    }

    /// Makes the guest shut down and enter its new kernel, and waits until that kernel's agent answers.
    fn execute(
        mut self,
        locked_vm: &LockedVm,
        mut journal: Journal,
        mut recorder: Recorder,
    ) -> Result<OsRebootReport, Failure> {
        let journal_failed = |e| Failure::needs_recovery(journal_error(locked_vm)(e));
        recorder.phase(Phase::Suspend);
        journal.advance(Step::Suspend).map_err(journal_failed)?;
        fault::point("kexec.suspend.journalled", Some(&self.vmm), None);
        self.qmp.drop_events();
        let kept_cache = disks::reuse_caches(&locked_vm.rundir, &locked_vm.state.hardware);
        let stopped_host_us = host_us();
        if let Err(problem) = self.request_kexec(locked_vm) {
            journal.close(End::Undone).map_err(journal_failed)?;
            return Err(Failure::unchanged(problem));
        }
        let timeout = locked_vm.state.definition.shutdown_timeout.as_duration();
        let outcome = match self.wait_for_boot(timeout, &mut recorder) {
            Ok(KexecOutcome::Stopped) => Err(KexecFailure::Stopped),
            outcome => outcome,
        };
        let outcome = outcome.map_err(|e| Failure::needs_recovery(not_returned(locked_vm, &e)))?;
        let resumed_host_us = host_us();
        let is_kexec = outcome == KexecOutcome::Kexec;
        if !is_kexec {
            tracing::warn!(
                "{}: the guest's kernel did not start the loaded one; the guest was rebooted by its firmware instead",
                locked_vm.rundir.name()
            );
        }
        recorder.step(if is_kexec { "start the new kernel" } else { "reset by its firmware" });
        recorder.phase(Phase::Settle);
        fault::point("kexec.settle.booted", Some(&self.vmm), None);
        journal.close(End::Done).map_err(journal_failed)?;
        recorder.step("record");
        recorder.write(&locked_vm.rundir);
        let qemu =
            QemuInfo { binary: self.vmm.binary.clone(), version: locked_vm.state.version.clone(), pid: self.vmm.pid };
        let report = RebootReport {
            name: locked_vm.rundir.name().into(),
            stopped_us: resumed_host_us.saturating_sub(stopped_host_us),
            stop_host_us: stopped_host_us,
            resume_host_us: resumed_host_us,
            steps: recorder.entries().to_vec(),
            from: qemu.clone(),
            to: qemu,
            memory: None,
            daemon_away_us: None,
            moved_in_place: None,
        };
        // A reset clears memory, and firmware uses memory: the remains of the cache are not worth a report.
        let kept = kept_cache.filter(|_| is_kexec);
        let kexec = is_kexec.then_some(self.loaded);
        Ok(OsRebootReport { report, kept, ended: None, kexec, phase: None })
    }

    /// Asks the guest to shut down and enter its new kernel.
    fn request_kexec(&self, locked_vm: &LockedVm) -> Result<(), RebootError> {
        let answer = agent::run(&self.vmm.directory().agent(), "/bin/sh", &["-c", "systemctl kexec"], ANSWER_TIMEOUT);
        fault::point("kexec.suspend.asked", Some(&self.vmm), None);
        match answer {
            Ok(command) if command.status != Some(0) => {
                let error = command.stderr.trim();
                Err(prevented(locked_vm, format!("`systemctl kexec` failed in the guest: {error}; or use --how cold")))
            }
            // The guest may have shut down before its agent could answer.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Waits until the agent of another boot answers, or the guest ends in another way.
    fn wait_for_boot(
        &mut self,
        shutdown_timeout: Duration,
        recorder: &mut Recorder,
    ) -> Result<KexecOutcome, KexecFailure> {
        let shutdown_deadline = Instant::now() + shutdown_timeout;
        while agent::is_listening(&mut self.qmp)? {
            if let Some(outcome) = self.check_outcome()? {
                return Ok(outcome);
            }
            if Instant::now() > shutdown_deadline {
                // A guest may end its agent last, or not at all. From here on, its boot ID decides.
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        recorder.step("shut its services down");
        recorder.phase(Phase::Renew);
        let boot_deadline = Instant::now() + shutdown_timeout / 2 + BOOT_TIMEOUT;
        loop {
            if let Some(outcome) = self.check_outcome()? {
                return Ok(outcome);
            }
            if AnsweringBoot::query(&self.vmm, &mut self.qmp, &self.old_boot_id)? == AnsweringBoot::Other {
                return Ok(KexecOutcome::Kexec);
            }
            if Instant::now() > boot_deadline {
                return Err(KexecFailure::Silent);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns whether the guest has stopped or was reset.
    fn check_outcome(&mut self) -> Result<Option<KexecOutcome>, QmpError> {
        let stopped = ENDED_RUN_STATES.contains(&run_state(&mut self.qmp)?.as_str());
        let reset = self.qmp.kept_events().any(|Event { name, .. }| name == "RESET");
        Ok(if stopped { Some(KexecOutcome::Stopped) } else { reset.then_some(KexecOutcome::Reset) })
    }
}

/// What the guest did after the request to start another kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KexecOutcome {
    /// Another kernel runs.
    Kexec,
    Reset,
    /// The guest has powered itself off, panicked, or requested a reset that QEMU is configured not to do.
    Stopped,
}

/// Reason why a kexec has failed or its outcome is unknown.
#[derive(Debug, thiserror::Error)]
enum KexecFailure {
    #[error("its agent does not answer")]
    Silent,
    #[error("it has shut down or crashed instead")]
    Stopped,
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

fn journal_error(locked_vm: &LockedVm) -> impl Fn(io::Error) -> RebootError + use<> {
    RebootError::file(&locked_vm.rundir.file("operation.json"))
}

fn not_returned(locked_vm: &LockedVm, failure: &KexecFailure) -> RebootError {
    let name = locked_vm.rundir.name();
    // A guest that does not answer may still run.
    let force = if matches!(failure, KexecFailure::Silent) { " --force" } else { "" };
    let what = format!(
        "its guest was asked to start the kernel that it has loaded, but did not return: {failure}; check its \
         console (rekindle console {name}), or boot it: rekindle recover {name}{force}"
    );
    RebootError::Kexec { name: name.into(), what }
}

/// The boot of the guest in which an agent answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnsweringBoot {
    Old,
    Other,
    /// No agent answers.
    None,
}

impl AnsweringBoot {
    fn query(vmm: &Vmm, qmp: &mut Qmp, old_boot_id: &str) -> Result<Self, QmpError> {
        if !agent::is_listening(qmp)? {
            return Ok(Self::None);
        }
        Ok(match agent::boot_id(&vmm.directory().agent(), ANSWER_TIMEOUT) {
            Ok(boot_id) if boot_id == old_boot_id => Self::Old,
            Ok(_) => Self::Other,
            Err(_) => Self::None,
        })
    }
}

/// What the guest does after Rekindle was killed during a kexec.
pub(crate) enum KexecRecovery {
    /// It runs the other kernel.
    RunsOtherKernel,
    /// It runs the previous kernel, and does not shut down.
    RunsPreviousKernel,
    /// It has ended, or it does not answer and is to be booted because of `force`.
    MustBoot,
}

/// Determines what the guest does after Rekindle was killed during a kexec.
///
/// # Errors
/// [`RebootError::Kexec`] if the guest's agent does not answer: the guest may run.
pub(crate) fn recover(locked_vm: &LockedVm, journal: &Journal, force: bool) -> Result<KexecRecovery, RebootError> {
    let Ok(vmm) = locked_vm.vmm() else { return Ok(KexecRecovery::MustBoot) };
    let mut qmp = match vmm.connect(vmm::START_TIMEOUT) {
        Err(_) if !vmm.is_alive() => return Ok(KexecRecovery::MustBoot),
        connected => connected?,
    };
    if journal.operation.step == Step::Prepare {
        return Ok(KexecRecovery::RunsPreviousKernel);
    }
    let old_boot_id = journal.operation.boot.clone().unwrap_or_default();
    let deadline = Instant::now() + locked_vm.state.definition.shutdown_timeout.as_duration() + BOOT_TIMEOUT;
    // Since when the agent of the old boot answers. The guest may not have started to shut down yet: a moment later
    // another boot may answer, or the port is closed.
    let mut old_boot_answers_since = None;
    while Instant::now() < deadline {
        if !vmm.is_alive() || ENDED_RUN_STATES.contains(&run_state(&mut qmp)?.as_str()) {
            return Ok(KexecRecovery::MustBoot);
        }
        match AnsweringBoot::query(vmm, &mut qmp, &old_boot_id)? {
            AnsweringBoot::Other => return Ok(KexecRecovery::RunsOtherKernel),
            AnsweringBoot::Old => {
                if old_boot_answers_since.get_or_insert_with(Instant::now).elapsed() > IGNORED_AFTER {
                    return Ok(KexecRecovery::RunsPreviousKernel);
                }
            }
            AnsweringBoot::None => old_boot_answers_since = None,
        }
        thread::sleep(POLL_INTERVAL);
    }
    if force { Ok(KexecRecovery::MustBoot) } else { Err(not_returned(locked_vm, &KexecFailure::Silent)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_failure_names_what_is_missing_and_another_method() {
        for (status, word) in [
            (Some(10), "systemd"),
            (Some(11), "kexec-tools"),
            (Some(12), "CONFIG_KEXEC"),
            (Some(13), "/boot/other"),
            (Some(14), "--initrd none"),
            (Some(15), "/boot/ram"),
            (Some(16), "lockdown"),
            (None, "exit status None"),
        ] {
            let text = load_failure(status, "/boot/other", "/boot/ram", "/boot/vmlinuz", "no");
            assert!(text.contains(word) && text.ends_with("; or use --how cold"), "{text}");
        }
        assert!(load_failure(Some(13), "", "", "", "").contains("--kernel PATH"));
    }
}
