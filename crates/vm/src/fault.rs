//! Fault points: named points at which a test can kill or stop a process.
//!
//! `REKINDLE_FAULT=POINT:ACTION` in the environment selects a point, e.g.
//! `REKINDLE_FAULT=warm.suspend.stopped:kill-old`. `POINT:ACTION:VM` selects it only for this VM, of several. A test
//! runs through all of [`POINTS`], so that a new point is tested automatically. Without the variable a point costs one check of a flag.

use rekindle_kernel::process::Process;
use rekindle_qemu::vmm::Vmm;
use rustix::process::Signal;
use std::env;
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

/// Limit for a killed QEMU to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Every fault point, grouped by operation and in the order in which the operation passes them: a warm, a saved and a
/// cold reboot; reboots of a guest by kexec, with its cache and by a phase; the preparation of a restore; a restore;
/// a protector and a pager during a fill; the first pause of an attached QEMU by one command; a protector that holds its
/// guest's output; a move; the suspend and resume of a host.
pub const POINTS: &[&str] = &[
    "warm.prepare.journalled",
    "warm.prepare.spawned",
    "warm.prepare.recorded",
    "warm.prepare.ready",
    "warm.suspend.journalled",
    "warm.suspend.stopped",
    "warm.suspend.taps",
    "warm.suspend.saved",
    "warm.suspend.written",
    "warm.resume.journalled",
    "warm.resume.resumed",
    "warm.settle.journalled",
    "warm.settle.old-gone",
    "warm.settle.recorded",
    "saved.suspend.journalled",
    "saved.suspend.stopped",
    "saved.suspend.saved",
    "saved.renew.old-gone",
    "saved.renew.spawned",
    "saved.renew.recorded",
    "saved.renew.loaded",
    "saved.resume.journalled",
    "saved.resume.resumed",
    "saved.settle.recorded",
    "cold.suspend.journalled",
    "cold.suspend.frozen",
    "cold.suspend.off",
    "cold.renew.memory",
    "cold.renew.spawned",
    "cold.renew.recorded",
    "cold.resume.journalled",
    "cold.resume.resumed",
    "cold.settle.recorded",
    "kexec.prepare.journalled",
    "kexec.suspend.journalled",
    "kexec.suspend.asked",
    "kexec.settle.booted",
    "cache.renew.kept",
    "cache.renew.shared",
    "cache.renew.memory",
    "phase.prepare.chosen",
    "phase.prepare.spawned",
    "phase.prepare.ready",
    "phase.renew.replaced",
    "phase.renew.agreed",
    "prepare.journalled",
    "prepare.spawned",
    "prepare.recorded",
    "restore.prepare.journalled",
    "restore.prepare.spawned",
    "restore.prepare.recorded",
    "restore.renew.registered",
    "restore.renew.loaded",
    "restore.resume.journalled",
    "restore.resume.resumed",
    "restore.settle.recorded",
    "restore.settle.handed-over",
    "fill.checkpoint.collected",
    "fill.handover.stopped",
    "fill.handover.tracked",
    "fill.handover.resumed",
    "fill.handover.recorded",
    "fill.end.locked",
    "fill.end.closed",
    "pause.pipe.offered",
    "output.committed",
    "move.prepare.journalled",
    "move.prepare.registered",
    "move.prepare.prepared",
    "move.suspend.journalled",
    "move.suspend.read",
    "move.suspend.committed",
    "move.suspend.let-go",
    "move.resume.journalled",
    "move.resume.told",
    "move.settle.running",
    "move.settle.journalled",
    "host.suspend.ahead",
    "host.suspend.journalled",
    "host.suspend.stopped",
    "host.suspend.saved",
    "host.suspend.listed",
    "host.suspend.committed",
    "host.suspend.ended",
    "host.resume.placed",
    "host.resume.loaded",
    "host.resume.struck",
    "host.resume.resumed",
    "host.resume.recorded",
];

/// Every fault point of the replacement of the QEMU of a libvirt domain, in the order in which it passes them.
pub const DOMAIN_POINTS: &[&str] = &[
    "replace.prepare.journalled",
    "replace.prepare.tpm-unlocked",
    "replace.prepare.tpm-started",
    "replace.prepare.spawned",
    "replace.prepare.compared",
    "replace.prepare.copied",
    "libvirt.daemon.stopping",
    "libvirt.daemon.stopped",
    "replace.suspend.journalled",
    "replace.suspend.stopped",
    "replace.suspend.taps",
    "replace.suspend.copied",
    "replace.suspend.frozen",
    "replace.suspend.loaded",
    "replace.resume.journalled",
    "replace.resume.resumed",
    "replace.give-back.frozen",
    "replace.give-back.tpm-passed",
    "replace.give-back.graphics-passed",
    "libvirt.give-back.status-written",
    "libvirt.give-back.pid-written",
    "libvirt.give-back.daemon-started",
    "libvirt.give-back.reconnected",
    "replace.settle.journalled",
    "replace.settle.source-gone",
];

/// Further fault points of the replacement of a QEMU whose guest's RAM is moved in place, after the guest has resumed.
pub const MOVE_POINTS: &[&str] = &["replace.move.supplied", "replace.move.dropped", "replace.move.complete"];

/// Every fault point of overlays on the disks of an attached QEMU, in the order in which a protector, then `detach`, and
/// last a restore pass them.
pub const OVERLAY_POINTS: &[&str] = &[
    "overlay.begin.recorded",
    "overlay.begin.directory",
    "overlay.create.file",
    "overlay.create.opened",
    "overlay.create.durable",
    "overlay.mark.prepared",
    "overlay.mark.marked",
    "overlay.seal.sealed",
    "overlay.merge.floor",
    "overlay.merge.started",
    "overlay.merge.merged",
    "overlay.merge.recorded",
    "overlay.merge.deleted",
    "overlay.end.closed",
    "overlay.end.copied",
    "overlay.end.stopped",
    "overlay.end.on-image",
    "overlay.end.removed",
    "overlay.restore.created",
    "overlay.restore.recorded",
];

/// Every fault point of a restore into libvirt, in the order in which it passes them.
pub const RESTORE_DOMAIN_POINTS: &[&str] = &[
    "libvirt-restore.prepare.journalled",
    "libvirt-restore.prepare.overlays",
    "libvirt-restore.prepare.owned",
    "libvirt-restore.renew.registered",
    "libvirt-restore.renew.loaded",
    "libvirt-restore.renew.attached",
    "libvirt-restore.resume.journalled",
    "libvirt-restore.resume.resumed",
    "libvirt-restore.settle.handed-over",
    "libvirt-restore.settle.defined",
];

/// Further fault points of overlays on the disks of a libvirt domain.
pub const FENCE_POINTS: &[&str] = &[
    "overlay.mark.chosen",
    "overlay.mark.fenced",
    "overlay.mark.copied",
    "overlay.merge.unfenced",
    "overlay.merge.requested",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Kill this process.
    Kill,
    /// Stop this process, as a terminal's Ctrl-Z does.
    Stop,
    /// Kill the QEMU that ran the guest before the operation.
    KillSource,
    /// Kill the QEMU that will run the guest.
    KillDestination,
    /// Kill libvirt's daemon, if it runs.
    KillDaemon,
    /// Forget a written page at each collection, as tracking would that misses a write.
    ForgetPage,
}

/// The fault that the environment selects.
struct SelectedFault {
    point: String,
    action: Action,
    /// `None`: every VM that passes the point.
    vm: Option<String>,
}

fn selected_fault() -> Option<&'static SelectedFault> {
    static SELECTED: OnceLock<Option<SelectedFault>> = OnceLock::new();
    SELECTED
        .get_or_init(|| {
            let value = env::var("REKINDLE_FAULT").ok()?;
            let mut words = value.split(':').map(str::to_owned);
            let (point, action, vm) = (words.next()?, words.next()?, words.next());
            let action = match action.as_str() {
                "kill" => Action::Kill,
                "stop" => Action::Stop,
                "kill-old" => Action::KillSource,
                "kill-new" => Action::KillDestination,
                "kill-daemon" => Action::KillDaemon,
                "forget-page" => Action::ForgetPage,
                _ => return None,
            };
            Some(SelectedFault { point, action, vm })
        })
        .as_ref()
}

/// Passes the fault point `name` of an operation with these source and destination QEMUs.
pub fn point(name: &'static str, source: Option<&Vmm>, destination: Option<&Vmm>) {
    debug_assert!(
        [POINTS, DOMAIN_POINTS, MOVE_POINTS, RESTORE_DOMAIN_POINTS, OVERLAY_POINTS, FENCE_POINTS]
            .iter()
            .any(|points| points.contains(&name)),
        "fault point {name} is not listed"
    );
    let is_of = |vm: &str| source.or(destination).is_some_and(|vmm| name_of(vmm) == Some(vm));
    let is_here = |fault: &&SelectedFault| fault.point == name && fault.vm.as_deref().is_none_or(is_of);
    let Some(fault) = selected_fault().filter(is_here) else { return };
    let kill = |process: Option<Process>| {
        if let Some(process) = process {
            let _ = process.kill();
            let _ = process.wait_end(KILL_TIMEOUT);
        }
    };
    match fault.action {
        Action::Kill | Action::Stop => {
            // By number: a confined process may not read `/proc`, and may signal no process but itself.
            let signal = if fault.action == Action::Kill { Signal::KILL } else { Signal::STOP };
            let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
        }
        Action::KillSource => kill(source.map(Vmm::process)),
        Action::KillDestination => kill(destination.map(Vmm::process)),
        Action::KillDaemon => kill(libvirt_daemon()),
        Action::ForgetPage => {}
    }
}

/// Returns whether the fault `tracking:forget-page` is selected: each collection of written pages must drop one, so that a
/// test can show that a missed write is found. It is no point at which an operation can end, and not in [`POINTS`].
#[must_use]
pub fn forgets_page() -> bool {
    selected_fault().is_some_and(|fault| fault.point == "tracking" && fault.action == Action::ForgetPage)
}

/// Returns the name of the VM of a QEMU: that of its run directory.
fn name_of(vmm: &Vmm) -> Option<&str> {
    vmm.directory.parent()?.file_name()?.to_str()
}

/// Returns libvirt's daemon.
fn libvirt_daemon() -> Option<Process> {
    let pid = fs::read_to_string("/run/libvirtd.pid").ok()?;
    Process::of(pid.trim().parse().ok()?).ok()
}
