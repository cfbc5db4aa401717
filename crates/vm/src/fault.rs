//! Numbered points at which a test can make something die.
//!
//! `REKINDLE_FAULT=POINT:ACTION` in the environment, e.g. `REKINDLE_FAULT=warm.suspend.stopped:kill-old`. A test walks
//! through [`POINTS`], so a new point is tested automatically. Without the variable a point costs one
//! check of a flag.

use rekindle_qemu::vmm::Vmm;
use std::env;
use std::sync::OnceLock;
use std::time::Duration;

/// Every point, in the order in which a warm reboot, then a saved and a cold one, a guest's by kexec, with its cache
/// and by a phase, the preparation of a restore, a restore, a protector and a pager while it fills, a protector that
/// holds what its guest sends, a move, and the suspend and resume of a host pass them.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Kill this process.
    Kill,
    /// Stop this process, as a terminal's Ctrl-Z does.
    Stop,
    /// Kill the QEMU that ran the guest.
    KillOld,
    /// Kill the QEMU that shall run it.
    KillNew,
}

fn wanted() -> Option<&'static (String, Action)> {
    static WANTED: OnceLock<Option<(String, Action)>> = OnceLock::new();
    WANTED
        .get_or_init(|| {
            let value = env::var("REKINDLE_FAULT").ok()?;
            let (point, action) = value.split_once(':')?;
            let action = match action {
                "kill" => Action::Kill,
                "stop" => Action::Stop,
                "kill-old" => Action::KillOld,
                "kill-new" => Action::KillNew,
                _ => return None,
            };
            Some((point.to_owned(), action))
        })
        .as_ref()
}

/// Passes the point `name`. The QEMUs are those of the operation in hand.
pub fn point(name: &'static str, old: Option<&Vmm>, new: Option<&Vmm>) {
    debug_assert!(POINTS.contains(&name), "fault point {name} is not listed");
    let Some((_, action)) = wanted().filter(|(point, _)| point == name) else { return };
    let end = |vmm: Option<&Vmm>| {
        if let Some(vmm) = vmm {
            let _ = vmm.process().kill();
            let _ = vmm.process().wait_end(Duration::from_secs(10));
        }
    };
    match action {
        Action::Kill | Action::Stop => {
            if let Ok(me) = rekindle_kernel::process::Process::current() {
                let _ = if *action == Action::Kill { me.kill() } else { me.stop() };
            }
        }
        Action::KillOld => end(old),
        Action::KillNew => end(new),
    }
}
