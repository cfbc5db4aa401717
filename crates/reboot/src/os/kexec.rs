//! Kexec: the guest's kernel starts the guest's default kernel, without firmware and boot loader (section 3.1 of the
//! evaluation).
//!
//! The guest does all of this itself, requested through its agent: its own `kexec` program loads the kernel while
//! everything runs, then its systemd shuts down cleanly and enters the kernel. QEMU sees no reset and stays. The boot
//! ID proves that another kernel runs. `docs/os-reboot.md` has the sequence.

use super::OsRebootReport;
use crate::error::{Failure, Problem, RebootError};
use crate::vmm::{QemuInfo, RebootReport};
use rekindle_handover::GuestStatus;
use rekindle_qemu::agent::{self, ExecError};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::qemu::ENDED_RUN_STATES;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

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
    let mut recorder = Recorder::new(name, "reboot os --how kexec");
    let unchanged = |error: RebootError| Failure { guest: GuestStatus::Unchanged, error: Box::new(error) };
    let held = LockedVm::lock_after_phase_save(host, name, "reboot os --how kexec").map_err(|e| unchanged(e.into()))?;
    let prepared = prepare(&held, request, &mut recorder).map_err(unchanged)?;
    let journal = prepared.journal(&held).map_err(unchanged)?;
    fault::point("kexec.prepare.journalled", Some(&prepared.vmm), None);
    prepared.execute(&held, journal, recorder)
}

/// Checks that the guest of VM `name` can be asked to reboot by kexec. Loads nothing.
pub(super) fn check(host: &Host, name: &str, operation: &str) -> Result<(), Failure> {
    let unchanged = |error: RebootError| Failure { guest: GuestStatus::Unchanged, error: Box::new(error) };
    let held = LockedVm::lock_after_phase_save(host, name, operation).map_err(|e| unchanged(e.into()))?;
    check_guest(&held).map(drop).map_err(unchanged)
}

/// A running guest with the next kernel loaded.
struct PreparedKexec {
    vmm: Vmm,
    qmp: Qmp,
    /// ID of the boot that is to end.
    boot: String,
    loaded: LoadedKernel,
}

fn prevented(held: &LockedVm, why: impl Into<String>) -> RebootError {
    RebootError::Prevented { name: held.rundir.name().into(), problem: Problem(why.into()) }
}

/// Converts an agent's error, and adds another method as the remedy.
fn agent_unable(held: &LockedVm, error: &ExecError) -> RebootError {
    let cause = std::error::Error::source(error).map(|cause| format!(" ({cause})")).unwrap_or_default();
    prevented(held, format!("{error}{cause}; or use --how cold"))
}

/// Runs all checks that can fail before a kernel is loaded. Returns the current boot ID.
fn check_guest(held: &LockedVm) -> Result<(Vmm, Qmp, String), RebootError> {
    let vmm = held.vmm()?.clone();
    held.refuse_attached("rebooting its guest")?;
    if !held.state.hardware.agent {
        let why = "it has no port for the agent that would start the kernel; remove agent = false under [devices] and \
                   restart the VM, or use --how cold";
        return Err(prevented(held, why));
    }
    let mut qmp = vmm.connect(vmm::START_TIMEOUT)?;
    let state = run_state(&mut qmp)?;
    if state != "running" {
        return Err(prevented(held, format!("its guest does not run (QEMU reports `{state}`); use --how cold")));
    }
    let port = vmm.directory().agent();
    let boot = agent::boot_id(&port, ANSWER_TIMEOUT).map_err(|e| agent_unable(held, &e))?;
    Ok((vmm, qmp, boot))
}

/// Runs the checks and loads the kernel, which does not disturb the guest.
fn prepare(held: &LockedVm, request: &KexecRequest, recorder: &mut Recorder) -> Result<PreparedKexec, RebootError> {
    let (vmm, qmp, boot) = check_guest(held)?;
    let port = vmm.directory().agent();
    recorder.step("ask its agent");
    let text = |path: &Option<String>| path.clone().unwrap_or_default();
    let (kernel, initrd) = (text(&request.kernel), text(&request.initrd));
    let ran = agent::run(&port, "/bin/sh", &["-c", LOAD_SCRIPT, "sh", &kernel, &initrd], LOAD_TIMEOUT);
    let ran = ran.map_err(|e| agent_unable(held, &e))?;
    let loaded = ran.stdout.lines().find_map(|line| line.strip_prefix("loaded ")).and_then(|line| line.split_once(' '));
    let Some((kernel, initrd)) = loaded.filter(|_| ran.status == Some(0)) else {
        return Err(prevented(held, load_failure(ran.status, &kernel, &initrd, ran.stdout.trim(), ran.stderr.trim())));
    };
    let loaded = LoadedKernel { kernel: kernel.into(), initrd: (initrd != "none").then(|| initrd.into()) };
    recorder.step("load the kernel");
    Ok(PreparedKexec { vmm, qmp, boot, loaded })
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
    fn journal(&self, held: &LockedVm) -> Result<Journal, RebootError> {
        let failed = |source| RebootError::File { path: held.rundir.file("operation.json"), source };
        let generation = held.state.generation + 1;
        let mut journal =
            Journal::open(&held.rundir, Kind::OsKexec, Some(self.vmm.clone()), generation).map_err(failed)?;
        journal.operation.boot = Some(self.boot.clone());
        journal.write().map_err(failed)?;
        Ok(journal)
    }

    /// Makes the guest shut down and enter its new kernel, and waits until that kernel's agent answers.
    fn execute(
        mut self,
        held: &LockedVm,
        mut journal: Journal,
        mut recorder: Recorder,
    ) -> Result<OsRebootReport, Failure> {
        let failed = |source| RebootError::File { path: held.rundir.file("operation.json"), source };
        let needs_recovery = |error: RebootError| Failure { guest: GuestStatus::NeedsRecovery, error: Box::new(error) };
        recorder.phase(Phase::Suspend);
        journal.advance(Step::Suspend).map_err(|e| needs_recovery(failed(e)))?;
        fault::point("kexec.suspend.journalled", Some(&self.vmm), None);
        let port = self.vmm.directory().agent();
        self.qmp.drop_events();
        let kept = disks::reuse_caches(&held.rundir, &held.state.hardware);
        let stopped = host_us();
        let requested = agent::run(&port, "/bin/sh", &["-c", "systemctl kexec"], ANSWER_TIMEOUT);
        fault::point("kexec.suspend.asked", Some(&self.vmm), None);
        match requested {
            Ok(ran) if ran.status != Some(0) => {
                let why = format!("`systemctl kexec` failed in the guest: {}; or use --how cold", ran.stderr.trim());
                journal.close().map_err(|e| needs_recovery(failed(e)))?;
                return Err(Failure { guest: GuestStatus::Unchanged, error: Box::new(prevented(held, why)) });
            }
            // The guest may have shut down before its agent could answer.
            Ok(_) | Err(_) => {}
        }
        let patience = held.state.definition.shutdown_timeout.as_duration();
        let outcome =
            self.wait_for_boot(patience, &mut recorder).map_err(|e| needs_recovery(not_returned(held, &e)))?;
        match outcome {
            KexecOutcome::Kexec => {}
            KexecOutcome::Reset => tracing::warn!(
                "{}: the guest's kernel did not start the loaded one; the guest was rebooted by its firmware instead",
                held.rundir.name()
            ),
            KexecOutcome::Stopped => return Err(needs_recovery(not_returned(held, &KexecFailure::Stopped))),
        }
        let resumed = host_us();
        let kexec = Some(self.loaded).filter(|_| outcome == KexecOutcome::Kexec);
        recorder.step(if kexec.is_some() { "start the new kernel" } else { "reset by its firmware" });
        recorder.phase(Phase::Settle);
        fault::point("kexec.settle.booted", Some(&self.vmm), None);
        journal.close().map_err(|e| needs_recovery(failed(e)))?;
        recorder.step("record");
        recorder.write(&held.rundir);
        let side = QemuInfo { binary: self.vmm.binary.clone(), version: held.state.version.clone(), pid: self.vmm.pid };
        let report = RebootReport {
            name: held.rundir.name().into(),
            stopped_us: resumed.saturating_sub(stopped),
            stop_host_us: stopped,
            resume_host_us: resumed,
            steps: recorder.entries().to_vec(),
            from: side.clone(),
            to: side,
            memory: None,
        };
        // A reset clears memory, and firmware uses memory: the remains of the cache are not worth a report.
        let kept = kept.filter(|_| kexec.is_some());
        Ok(OsRebootReport { report, kept, ended: None, kexec, phase: None })
    }

    /// Waits until the agent of another boot answers, or the guest ends in another way.
    fn wait_for_boot(&mut self, patience: Duration, recorder: &mut Recorder) -> Result<KexecOutcome, KexecFailure> {
        let down = Instant::now() + patience;
        while agent::is_listening(&mut self.qmp)? {
            if let Some(outcome) = self.check_outcome()? {
                return Ok(outcome);
            }
            if Instant::now() > down {
                // A guest may end its agent last, or not at all. From here on, its boot ID decides.
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        recorder.step("shut its services down");
        recorder.phase(Phase::Renew);
        let up = Instant::now() + patience.saturating_sub(patience / 2) + BOOT_TIMEOUT;
        loop {
            if let Some(outcome) = self.check_outcome()? {
                return Ok(outcome);
            }
            if is_other_boot(&self.vmm, &mut self.qmp, &self.boot)? == Some(true) {
                return Ok(KexecOutcome::Kexec);
            }
            if Instant::now() > up {
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

fn not_returned(held: &LockedVm, not_returned: &KexecFailure) -> RebootError {
    let name = held.rundir.name();
    // A guest that does not answer may still run.
    let force = if matches!(not_returned, KexecFailure::Silent) { " --force" } else { "" };
    let what = format!(
        "its guest was asked to start the kernel that it has loaded, but did not return: {not_returned}; check its \
         console (rekindle console {name}), or boot it: rekindle recover {name}{force}"
    );
    RebootError::Kexec { name: name.into(), what }
}

/// Returns whether the guest's agent runs in another boot than `boot`; `None` if no agent answers.
fn is_other_boot(vmm: &Vmm, qmp: &mut Qmp, boot: &str) -> Result<Option<bool>, QmpError> {
    if !agent::is_listening(qmp)? {
        return Ok(None);
    }
    Ok(agent::boot_id(&vmm.directory().agent(), ANSWER_TIMEOUT).ok().map(|now| now != boot))
}

/// Returns, after Rekindle was killed during a kexec, whether the guest runs another kernel. `None`: the guest has
/// ended, or it does not answer and is to be booted because of `force`.
///
/// # Errors
/// [`RebootError::Kexec`] if the guest's agent does not answer: the guest may run.
pub(crate) fn recover(held: &LockedVm, journal: &Journal, force: bool) -> Result<Option<bool>, RebootError> {
    let Ok(vmm) = held.vmm() else { return Ok(None) };
    let mut qmp = match vmm.connect(vmm::START_TIMEOUT) {
        Err(_) if !vmm.is_alive() => return Ok(None),
        other => other?,
    };
    if journal.operation.step == Step::Prepare {
        return Ok(Some(false));
    }
    let boot = journal.operation.boot.clone().unwrap_or_default();
    // The guest may not have started to shut down yet: a moment later another boot may answer, or the port is closed.
    let settled = held.state.definition.shutdown_timeout.as_duration();
    let (began, mut same_since) = (Instant::now(), None);
    while began.elapsed() < settled + BOOT_TIMEOUT {
        if !vmm.is_alive() || ENDED_RUN_STATES.contains(&run_state(&mut qmp)?.as_str()) {
            return Ok(None);
        }
        match is_other_boot(vmm, &mut qmp, &boot)? {
            Some(true) => return Ok(Some(true)),
            Some(false) if same_since.get_or_insert_with(Instant::now).elapsed() > IGNORED_AFTER => {
                return Ok(Some(false));
            }
            Some(false) => {}
            None => same_since = None,
        }
        thread::sleep(POLL_INTERVAL);
    }
    if force { Ok(None) } else { Err(not_returned(held, &KexecFailure::Silent)) }
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
