//! Moves a VM to another node while its guest runs: `migrate_to`. There, `migrate_from` only checks that it runs: the
//! move has already resumed the guest, and the check starts a protector ([`crate::monitor`]).

use crate::loops;
use crate::resource::Resource;
use rekindle_protect::moving::source::{MoveSettings, start};
use rekindle_protect::moving::{MoveError, MoveEvent, MoveReport, RemoteHost};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Returns the settings of a move to the node that `far` leads to.
#[must_use]
pub fn settings(resource: &Resource, remote: RemoteHost) -> MoveSettings {
    let (store, identity) = (resource.protect.store.clone(), resource.protect.identity.clone());
    MoveSettings { remote, store, create_store: false, identity, definition: None, qemu: None }
}

/// Moves the VM to the node that `far` leads to. Steps that are not started by `deadline` are not started any more.
///
/// *Needs:* a store and disk images that both nodes reach, and a way to run commands on the other node.
/// *On success:* its guest runs there; nothing of it remains here.
/// *On failure:* it continues to run here, and checkpoints of it are taken as before, unless
/// [`MoveError::needs_recovery`] is true: then a stop here, followed by a start on any node, repairs it.
///
/// # Errors
/// [`MoveError`].
pub fn migrate_to(
    host: &Host,
    resource: &Resource,
    remote: RemoteHost,
    deadline: Instant,
    report: &mut dyn FnMut(&MoveEvent),
) -> Result<MoveReport, MoveError> {
    let settings = settings(resource, remote);
    let late = Arc::new(AtomicBool::new(false));
    let is_late = Arc::clone(&late);
    thread::spawn(move || {
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        is_late.store(true, Ordering::Relaxed);
    });
    start(host, &resource.name, &settings, &late, report).inspect_err(|e| {
        let rundir = RunDir::new(&host.root, resource.name.as_str());
        if !e.needs_recovery()
            && rundir.exists()
            && let Err(e) = loops::ensure(&rundir, resource)
        {
            tracing::error!("{}: it runs on this node, but its protector cannot be started: {e}", resource.name);
        }
    })
}
