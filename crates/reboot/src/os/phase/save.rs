//! Saving a candidate.

use super::candidates::{self, About, chain};
use rekindle_protect::candidate;
use rekindle_protect::target::Target;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::uncarriable;
use rekindle_vm::host::Host;
use rekindle_vm::life::{Held, LifeError};
use rekindle_vm::phases;
use rekindle_vm::rundir::{RunDir, sync_directory};
use serde_json::Value;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long somebody else may be at work on the VM, or its memory be on its way: the guest waits no longer.
const BUSY: Duration = Duration::from_secs(10);
/// Between two looks at what cannot be waited for.
const LOOK: Duration = Duration::from_millis(20);

/// What has come of it.
pub(super) enum Saved {
    Now {
        stopped_us: u64,
        bytes: u64,
    },
    /// There is one already that may be used.
    Before,
}

/// Have a candidate of `phase`, in which the guest of `vmm` is.
pub(super) fn save(host: &Host, rundir: &RunDir, vmm: &Vmm, phase: &str) -> Result<Saved, String> {
    let held = hold(host, rundir)?;
    let state = &held.state;
    if state.vmm.as_ref() != Some(vmm) {
        return Err("another QEMU runs the guest now".into());
    }
    if !state.definition.phase.save.iter().any(|name| name == phase) {
        return Err("the VM's definition does not name it under phase.save".into());
    }
    if let Some(why) = super::unfit(&state.hardware) {
        return Err(why);
    }
    if let Some(why) = uncarriable(&state.definition).first() {
        return Err(why.clone());
    }
    if let Some(file) = unwatched(vmm, &state.hardware).map_err(|e| chain(&e))? {
        return Err(format!(
            "QEMU itself has {file} open for the guest (`qemu_args`), and nobody knows what is written to it"
        ));
    }
    if candidates::find(host, rundir, state, phase).good.is_ok() {
        return Ok(Saved::Before);
    }
    let deadline = Instant::now() + BUSY;
    while rundir.fill().exists() {
        if Instant::now() > deadline {
            return Err("the guest's memory is still being brought".into());
        }
        thread::sleep(LOOK);
    }
    let directory = phases::directory(host, rundir, &state.definition);
    let (place, new) = (directory.join(phase), directory.join(format!("{phase}.new")));
    let failed = |path: &Path, e: io::Error| format!("{}: {e}", path.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|e| failed(&directory, e))?;
    // What one that was killed has left.
    remove(&new).map_err(|e| failed(&new, e))?;
    let target = Target::of(host, rundir.name()).map_err(|e| chain(&e))?;
    let about = || About::now(rundir, &state.hardware).map(|about| candidates::value(&about));
    let taken = candidate::take(&target, &StoreUrl::Directory(new.clone()), about);
    let taken = taken.map_err(|e| {
        let _ = remove(&new);
        chain(&e)
    })?;
    // Whoever comes in between finds none.
    let put = remove(&place).and_then(|()| fs::rename(&new, &place)).and_then(|()| sync_directory(&directory));
    put.map_err(|e| failed(&place, e))?;
    Ok(Saved::Now { stopped_us: taken.stopped_us, bytes: taken.bytes })
}

/// An image that QEMU has open and that is no `[[disk]]`: one of those that has no server is only read.
fn unwatched(vmm: &Vmm, hardware: &Hardware) -> Result<Option<String>, QmpError> {
    let mut qmp = Qmp::connect(&vmm.directory().qmp(), BUSY)?;
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let files = devices.iter().filter_map(|device| device.pointer("/inserted/file").and_then(Value::as_str));
    let is_known = |file: &str| hardware.disks.iter().any(|disk| disk.readonly && disk.path == Path::new(file));
    Ok(files.filter(|file| !is_known(file)).map(str::to_owned).next())
}

/// The VM, once nobody else is at work on it: whoever has started the guest is about to be done.
fn hold(host: &Host, rundir: &RunDir) -> Result<Held, String> {
    let deadline = Instant::now() + BUSY;
    loop {
        match Held::take(host, rundir.name(), phases::SAVING) {
            Err(LifeError::Lock(_)) if Instant::now() < deadline => thread::sleep(LOOK),
            held => return held.map_err(|e| chain(&e)),
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
