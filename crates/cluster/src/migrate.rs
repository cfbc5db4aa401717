//! Moves a VM to another node while its guest runs: the action `migrate_to` on the source node. On the destination
//! node, `migrate_from` only checks that the guest runs, and starts a protector ([`crate::monitor`]): the move has
//! already resumed the guest.

use crate::loops;
use crate::resource::Resource;
use rekindle_protect::moving::source::MoveSettings;
use rekindle_protect::moving::{MoveError, MoveEvent, MoveReport, RemoteHost};
use rekindle_reboot::moving::start;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Returns the settings of a move to `remote`.
#[must_use]
pub fn settings(resource: &Resource, remote: RemoteHost) -> MoveSettings {
    let (store, credentials) = (resource.protect.store.clone(), resource.protect.credentials.clone());
    MoveSettings {
        remote,
        store,
        create_store: false,
        credentials,
        definition: None,
        qemu: None,
        connect: None,
        preview: false,
    }
}

/// Moves the VM to the node `remote`. After `deadline`, no further step of the move is started.
///
/// *Needs:* a store and disk images that both nodes reach, and a way to run commands on the other node.
/// *On success:* the guest runs on the destination node; nothing of the VM remains on this node.
/// *On failure:* the guest continues to run on this node and is protected as before, unless
/// [`MoveError::needs_recovery`] is true: then stop the resource on this node and start it on any node.
pub fn migrate_to(
    host: &Host,
    resource: &Resource,
    remote: RemoteHost,
    deadline: Instant,
    report: &mut dyn FnMut(&MoveEvent),
) -> Result<MoveReport, MoveError> {
    let settings = settings(resource, remote);
    let is_late = Arc::new(AtomicBool::new(false));
    let is_late_in_timer = Arc::clone(&is_late);
    thread::spawn(move || {
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        is_late_in_timer.store(true, Ordering::Relaxed);
    });
    start(host, &resource.name, &settings, &is_late, report).inspect_err(|e| {
        let rundir = RunDir::new(&host.root, resource.name.as_str());
        if !e.needs_recovery()
            && rundir.exists()
            && let Err(e) = loops::ensure(&rundir, resource)
        {
            tracing::error!("{}: it runs on this node, but its protector cannot be started: {e}", resource.name);
        }
    })
}
