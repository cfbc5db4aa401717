//! A node gives the VM to another one while its guest runs: `migrate_to`. `migrate_from` there is a look whether it runs: what has brought
//! it has let it go on already, and whoever looks gives it a protector ([`crate::monitor`]).

use crate::loops;
use crate::resource::Resource;
use rekindle_protect::moving::source::{Settings, start};
use rekindle_protect::moving::{Event, Far, MoveError, Moved};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// What a move of the VM to the node that `far` leads to needs to know.
#[must_use]
pub fn settings(resource: &Resource, far: Far) -> Settings {
    let (store, identity) = (resource.protect.store.clone(), resource.protect.identity.clone());
    Settings { far, store, create_store: false, identity, definition: None, qemu: None }
}

/// Move the VM to the node that `far` leads to; what is not done by `deadline` is not begun any more.
///
/// *Needs:* what a move needs: a store and disk images that both nodes reach, and a way for commands from one to the other.
/// *On success:* its guest runs there; nothing of it is left here.
/// *On failure:* it goes on here, and checkpoints of it are taken as before, but for what [`MoveError::needs_recovery`] is true of: a stop
/// here, and a start anywhere, mend that.
///
/// # Errors
/// [`MoveError`].
pub fn migrate_to(
    host: &Host,
    resource: &Resource,
    far: Far,
    deadline: Instant,
    tell: &mut dyn FnMut(&Event),
) -> Result<Moved, MoveError> {
    let settings = settings(resource, far);
    let late = Arc::new(AtomicBool::new(false));
    let is_late = Arc::clone(&late);
    thread::spawn(move || {
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        is_late.store(true, Ordering::Relaxed);
    });
    start(host, &resource.name, &settings, &late, tell).inspect_err(|e| {
        let rundir = RunDir::new(&host.root, resource.name.as_str());
        if !e.needs_recovery()
            && rundir.exists()
            && let Err(e) = loops::ensure(&rundir, resource)
        {
            tracing::error!("{}: it goes on here, and nobody takes checkpoints of it: {e}", resource.name);
        }
    })
}
