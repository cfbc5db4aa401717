//! What a QEMU is started from: read ahead while the host still boots.
//!
//! After a boot nothing of it is in memory, and its program and libraries are tens of megabytes. When guests are suspended it is noted
//! which files their QEMUs have mapped; the first thing that is done for them in the next kernel is to ask for these. To have one no more, or
//! another one, does no harm.

use rekindle_kernel::maps;
use rekindle_qemu::vmm::Vmm;
use rustix::fs::{Advice, fadvise};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The program of a QEMU that runs, and its libraries.
pub(super) fn mapped(vmm: &Vmm) -> Vec<PathBuf> {
    let maps = maps::of(vmm.process()).unwrap_or_else(|e| {
        tracing::debug!("process {}: what it has mapped is not known: {e}", vmm.pid);
        Vec::new()
    });
    let code = maps.iter().filter(|map| !map.shared).map(|map| Path::new(&map.name));
    // A set: each is mapped in several pieces.
    let files: BTreeSet<_> = code.filter(|path| path.is_absolute() && path.is_file()).map(Path::to_owned).collect();
    files.into_iter().collect()
}

/// Have the system read them; nobody waits for it.
pub(super) fn read_ahead<'a>(files: impl Iterator<Item = &'a PathBuf>) {
    for path in files.collect::<BTreeSet<_>>() {
        let asked = File::open(path).and_then(|file| Ok(fadvise(&file, 0, None, Advice::WillNeed)?));
        if let Err(e) = asked {
            tracing::debug!("{}: {e}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_gone_or_is_none_is_no_error() {
        let here = std::env::current_exe().unwrap();
        read_ahead([here, "/nowhere".into(), "/".into()].iter());
    }
}
