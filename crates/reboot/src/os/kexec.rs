//! Kexec: the guest's kernel is replaced by its default one without firmware and boot loader (section 3.1 of the evaluation).
//!
//! All of it is done by the guest itself, asked through its agent: its own `kexec` loads the kernel while everything goes on, and its own
//! systemd then shuts all down in order and jumps. QEMU sees no reset, and stays; so the proof that another kernel runs is the number
//! that it gives to its boot. `docs/os-reboot.md` has the sequence.

use super::Rebooted;
use crate::vmm::{Failure, Left, Problem, RebootError, Report, Side};
use rekindle_qemu::agent::{self, ExecError};
use rekindle_qemu::qmp::{Event, Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{self, Held, run_state};
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use rekindle_vm::{disks, fault};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// What finds the kernel and loads it, in the guest.
const LOAD: &str = include_str!("kexec.sh");
/// How long that may take: it reads kernel and RAM disk, from a disk that may be slow.
const LOADING: Duration = Duration::from_secs(120);
/// How long an agent may take for a short question.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the new kernel may take from the end of the old one until its agent answers.
const BOOT: Duration = Duration::from_secs(300);
/// A guest whose agent answers for so long, of the same boot, was not told to shut down.
const OBEYED: Duration = Duration::from_secs(10);
/// Between two looks at the guest.
const LOOK: Duration = Duration::from_millis(20);

/// What is to be loaded; paths in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The kernel; none: the guest's default one.
    pub kernel: Option<String>,
    /// Its initial RAM disk, `none` for none; not given: the one that belongs to the kernel.
    pub initrd: Option<String>,
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// The kernel, in the guest.
    pub kernel: PathBuf,
    /// Its initial RAM disk, if it has one.
    pub initrd: Option<PathBuf>,
}

/// Reboot the guest of VM `name` by kexec.
///
/// *Needs:* qemu-guest-agent that may run programs, systemd and `kexec` in the guest; nothing else at work on the VM.
/// *On success:* another kernel runs, and its agent answers. QEMU is the same.
/// *On failure:* as [`Failure::left`] says.
pub(super) fn reboot(host: &Host, name: &str, wanted: &Wanted) -> Result<Rebooted, Failure> {
    let mut recorder = Recorder::new(name, "reboot os --how kexec");
    let as_it_was = |error: RebootError| Failure { left: Left::AsItWas, error: Box::new(error) };
    let held = Held::take_once_saved(host, name, "reboot os --how kexec").map_err(|e| as_it_was(e.into()))?;
    let begun = begin(&held, wanted, &mut recorder).map_err(as_it_was)?;
    let journal = begun.journal(&held).map_err(as_it_was)?;
    fault::point("kexec.prepare.journalled", Some(&begun.vmm), None);
    begun.go(&held, journal, recorder)
}

/// Looks at whether the guest of VM `name` could be asked to reboot by kexec. Nothing is loaded.
pub(super) fn check(host: &Host, name: &str, operation: &str) -> Result<(), Failure> {
    let as_it_was = |error: RebootError| Failure { left: Left::AsItWas, error: Box::new(error) };
    let held = Held::take_once_saved(host, name, operation).map_err(|e| as_it_was(e.into()))?;
    ask(&held).map(drop).map_err(as_it_was)
}

/// A kernel that is loaded, in a guest that runs on.
struct Begun {
    vmm: Vmm,
    qmp: Qmp,
    /// The number of the boot that is to end.
    boot: String,
    loaded: Loaded,
}

fn against(held: &Held, why: impl Into<String>) -> RebootError {
    RebootError::Against { name: held.rundir.name().into(), problem: Problem(why.into()) }
}

/// What cannot be done by an agent, said with another way.
fn unable(held: &Held, error: &ExecError) -> RebootError {
    let cause = std::error::Error::source(error).map(|cause| format!(" ({cause})")).unwrap_or_default();
    against(held, format!("{error}{cause}; or use --how cold"))
}

/// Everything that may be refused before a kernel is loaded. Gives the number of the boot that runs.
fn ask(held: &Held) -> Result<(Vmm, Qmp, String), RebootError> {
    let vmm = held.vmm()?.clone();
    held.refuse_attached("rebooting its guest")?;
    if !held.state.hardware.agent {
        let why = "it has no port for an agent, through which it could be asked to; leave out agent = false under [devices] and \
                   start it again, or use --how cold";
        return Err(against(held, why));
    }
    let mut qmp = vmm.connect(vmm::START)?;
    let state = run_state(&mut qmp)?;
    if state != "running" {
        return Err(against(held, format!("its guest does not run ({state}); use --how cold")));
    }
    let port = vmm.directory().agent();
    let boot = agent::boot_id(&port, ANSWER).map_err(|e| unable(held, &e))?;
    Ok((vmm, qmp, boot))
}

/// The same, and loading the kernel, of which the guest feels nothing.
fn begin(held: &Held, wanted: &Wanted, recorder: &mut Recorder) -> Result<Begun, RebootError> {
    let (vmm, qmp, boot) = ask(held)?;
    let port = vmm.directory().agent();
    recorder.step("ask its agent");
    let text = |path: &Option<String>| path.clone().unwrap_or_default();
    let (kernel, initrd) = (text(&wanted.kernel), text(&wanted.initrd));
    let ran = agent::run(&port, "/bin/sh", &["-c", LOAD, "sh", &kernel, &initrd], LOADING);
    let ran = ran.map_err(|e| unable(held, &e))?;
    let loaded = ran.out.lines().find_map(|line| line.strip_prefix("loaded ")).and_then(|line| line.split_once(' '));
    let Some((kernel, initrd)) = loaded.filter(|_| ran.status == Some(0)) else {
        return Err(against(held, refusal(ran.status, &kernel, &initrd, ran.out.trim(), ran.err.trim())));
    };
    let loaded = Loaded { kernel: kernel.into(), initrd: (initrd != "none").then(|| initrd.into()) };
    recorder.step("load the kernel");
    Ok(Begun { vmm, qmp, boot, loaded })
}

/// What the exit status of [`LOAD`] says.
fn refusal(status: Option<i64>, kernel: &str, initrd: &str, out: &str, err: &str) -> String {
    let why = match status {
        Some(10) => "no systemd runs in the guest, which would shut it down in order before the new kernel is started".into(),
        Some(11) => "there is no program `kexec` in the guest; install kexec-tools there".into(),
        Some(12) => "the guest's kernel is built without kexec (CONFIG_KEXEC)".into(),
        Some(13) if kernel.is_empty() => {
            "the guest's default kernel is not found (neither by grubby nor as /boot/vmlinuz, /vmlinuz or that of `uname -r`); \
             name it: --kernel PATH"
                .into()
        }
        Some(13) => format!("there is no kernel {kernel} in the guest"),
        Some(14) => format!(
            "no initial RAM disk lies beside the guest's kernel {out}; name it: --initrd PATH, or --initrd none if it needs none"
        ),
        Some(15) => format!("there is no initial RAM disk {initrd} in the guest"),
        Some(16) => format!(
            "the guest's kernel does not load another one (lockdown, an unsigned kernel, or kernel.kexec_load_disabled=1); \
             kexec said: {err}"
        ),
        status => format!("the guest could not load its kernel (exit status {status:?}): {err}"),
    };
    format!("{why}; or use --how cold")
}

impl Begun {
    fn journal(&self, held: &Held) -> Result<Journal, RebootError> {
        let failed = |source| RebootError::File { path: held.rundir.file("operation.json"), source };
        let generation = held.state.generation + 1;
        let mut journal =
            Journal::open(&held.rundir, Kind::OsKexec, Some(self.vmm.clone()), generation).map_err(failed)?;
        journal.operation.boot = Some(self.boot.clone());
        journal.write().map_err(failed)?;
        Ok(journal)
    }

    /// Have the guest shut down and jump, and wait until its new kernel's agent answers.
    fn go(mut self, held: &Held, mut journal: Journal, mut recorder: Recorder) -> Result<Rebooted, Failure> {
        let failed = |source| RebootError::File { path: held.rundir.file("operation.json"), source };
        let needs_recovery = |error: RebootError| Failure { left: Left::NeedsRecovery, error: Box::new(error) };
        recorder.phase(Phase::Suspend);
        journal.advance(Step::Suspend).map_err(|e| needs_recovery(failed(e)))?;
        fault::point("kexec.suspend.journalled", Some(&self.vmm), None);
        let port = self.vmm.directory().agent();
        self.qmp.drop_events();
        let kept = disks::reuse(&held.rundir, &held.state.hardware);
        let stopped = host_us();
        let asked = agent::run(&port, "/bin/sh", &["-c", "systemctl kexec"], ANSWER);
        fault::point("kexec.suspend.asked", Some(&self.vmm), None);
        match asked {
            Ok(ran) if ran.status != Some(0) => {
                let why = format!("`systemctl kexec` refuses in the guest: {}; or use --how cold", ran.err.trim());
                journal.close().map_err(|e| needs_recovery(failed(e)))?;
                return Err(Failure { left: Left::AsItWas, error: Box::new(against(held, why)) });
            }
            // It may have obeyed faster than it could answer.
            Ok(_) | Err(_) => {}
        }
        let patience = held.state.definition.shutdown_timeout.as_duration();
        let seen = self.wait(patience, &mut recorder).map_err(|e| needs_recovery(lost(held, &e)))?;
        match seen {
            Seen::Kexec => {}
            Seen::Reset => tracing::warn!(
                "{}: its kernel did not start the one that was loaded; it was rebooted all the same, by its firmware",
                held.rundir.name()
            ),
            Seen::Stopped => return Err(needs_recovery(lost(held, &Lost::Stopped))),
        }
        let resumed = host_us();
        let kexec = Some(self.loaded).filter(|_| seen == Seen::Kexec);
        recorder.step(if kexec.is_some() { "start the new kernel" } else { "reset by its firmware" });
        recorder.phase(Phase::Settle);
        fault::point("kexec.settle.booted", Some(&self.vmm), None);
        journal.close().map_err(|e| needs_recovery(failed(e)))?;
        recorder.step("record");
        recorder.write(&held.rundir);
        let side = Side { binary: self.vmm.binary.clone(), version: held.state.version.clone(), pid: self.vmm.pid };
        let report = Report {
            name: held.rundir.name().into(),
            stopped_us: resumed.saturating_sub(stopped),
            stop_host_us: stopped,
            resume_host_us: resumed,
            steps: recorder.entries().to_vec(),
            from: side.clone(),
            to: side,
            memory: None,
        };
        // A reset clears memory, and firmware uses it; what is left of it then is not worth a word.
        let kept = kept.filter(|_| kexec.is_some());
        Ok(Rebooted { report, kept, ended: None, kexec, phase: None })
    }

    /// Until another boot's agent answers, or the guest has done something else.
    fn wait(&mut self, patience: Duration, recorder: &mut Recorder) -> Result<Seen, Lost> {
        let down = Instant::now() + patience;
        while agent::listens(&mut self.qmp)? {
            if let Some(seen) = self.seen()? {
                return Ok(seen);
            }
            if Instant::now() > down {
                // The agent of a guest may be the last that it ends, or not be ended at all: its boot tells.
                break;
            }
            thread::sleep(LOOK);
        }
        recorder.step("shut its services down");
        recorder.phase(Phase::Renew);
        let up = Instant::now() + patience.saturating_sub(patience / 2) + BOOT;
        loop {
            if let Some(seen) = self.seen()? {
                return Ok(seen);
            }
            if is_another(&self.vmm, &mut self.qmp, &self.boot)? == Some(true) {
                return Ok(Seen::Kexec);
            }
            if Instant::now() > up {
                return Err(Lost::Silent);
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether the guest has done something else than what was wanted.
    fn seen(&mut self) -> Result<Option<Seen>, QmpError> {
        let stopped = life::SHUT_DOWN.contains(&run_state(&mut self.qmp)?.as_str());
        let reset = self.qmp.kept_events().any(|Event { name, .. }| name == "RESET");
        Ok(if stopped { Some(Seen::Stopped) } else { reset.then_some(Seen::Reset) })
    }
}

/// What has become of a guest that was to jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// Another kernel runs.
    Kexec,
    /// QEMU has reset it.
    Reset,
    /// It has powered itself off, panicked, or wants a reset that QEMU was told not to do.
    Stopped,
}

/// Why it is not known.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("no agent has answered since")]
    Silent,
    #[error("it has come to its end instead")]
    Stopped,
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

fn lost(held: &Held, lost: &Lost) -> RebootError {
    let name = held.rundir.name();
    // A guest that does not answer may run.
    let force = if matches!(lost, Lost::Silent) { " --force" } else { "" };
    let what = format!(
        "its guest was told to start the kernel that it has loaded, and is not there again: {lost}; look at its console (rekindle \
         console {name}), or have it booted: rekindle recover {name}{force}"
    );
    RebootError::Kexec { name: name.into(), what }
}

/// Whether the guest's agent is of another boot than `boot`; none if none answers.
fn is_another(vmm: &Vmm, qmp: &mut Qmp, boot: &str) -> Result<Option<bool>, QmpError> {
    if !agent::listens(qmp)? {
        return Ok(None);
    }
    Ok(agent::boot_id(&vmm.directory().agent(), ANSWER).ok().map(|now| now != boot))
}

/// After Rekindle was killed: whether the guest runs another kernel. None: it has come to its end, or does not answer and is to be booted
/// because of `force`.
///
/// # Errors
/// [`RebootError::Kexec`] if its agent does not answer: the guest may run.
pub(crate) fn recover(held: &Held, journal: &Journal, force: bool) -> Result<Option<bool>, RebootError> {
    let Ok(vmm) = held.vmm() else { return Ok(None) };
    let mut qmp = match vmm.connect(vmm::START) {
        Err(_) if !vmm.is_alive() => return Ok(None),
        other => other?,
    };
    if journal.operation.step == Step::Prepare {
        return Ok(Some(false));
    }
    let boot = journal.operation.boot.clone().unwrap_or_default();
    // It may not have begun to shut down: a moment later it is another boot, or the port is closed.
    let settled = held.state.definition.shutdown_timeout.as_duration();
    let (began, mut same_since) = (Instant::now(), None);
    while began.elapsed() < settled + BOOT {
        if !vmm.is_alive() || life::SHUT_DOWN.contains(&run_state(&mut qmp)?.as_str()) {
            return Ok(None);
        }
        match is_another(vmm, &mut qmp, &boot)? {
            Some(true) => return Ok(Some(true)),
            Some(false) if same_since.get_or_insert_with(Instant::now).elapsed() > OBEYED => return Ok(Some(false)),
            Some(false) => {}
            None => same_since = None,
        }
        thread::sleep(LOOK);
    }
    if force { Ok(None) } else { Err(lost(held, &Lost::Silent)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_names_what_is_missing_and_another_way() {
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
            let text = refusal(status, "/boot/other", "/boot/ram", "/boot/vmlinuz", "no");
            assert!(text.contains(word) && text.ends_with("; or use --how cold"), "{text}");
        }
        assert!(refusal(Some(13), "", "", "", "").contains("--kernel PATH"));
    }
}
