//! Reads ahead, while the host boots, the files from which QEMUs are started.
//!
//! After a boot none of these files is cached, and QEMU's program and libraries are tens of megabytes. A suspend
//! records which files the QEMUs have mapped; the next kernel reads them before the guests are resumed. A file that is
//! missing or has changed is harmless.

use rekindle_kernel::maps;
use rekindle_qemu::vmm::Vmm;
use rustix::fs::{Advice, fadvise};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Returns the paths of a running QEMU's program and libraries.
pub(super) fn mapped_files(vmm: &Vmm) -> Vec<PathBuf> {
    let mappings = maps::of(vmm.process()).unwrap_or_else(|e| {
        tracing::debug!("process {}: cannot read its mappings: {e}", vmm.pid);
        Vec::new()
    });
    let private = mappings.iter().filter(|mapping| !mapping.shared).map(|mapping| Path::new(&mapping.name));
    // A set, because each file is mapped in several pieces.
    let files: BTreeSet<_> = private.filter(|path| path.is_absolute() && path.is_file()).collect();
    files.into_iter().map(Path::to_owned).collect()
}

/// Makes the kernel read the files in the background.
pub(super) fn read_ahead<'a>(files: impl Iterator<Item = &'a PathBuf>) {
    for path in files.collect::<BTreeSet<_>>() {
        let requested = File::open(path).and_then(|file| Ok(fadvise(&file, 0, None, Advice::WillNeed)?));
        if let Err(e) = requested {
            tracing::debug!("{}: {e}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_or_a_directory_is_no_error() {
        let program = std::env::current_exe().unwrap();
        read_ahead([program, "/nowhere".into(), "/".into()].iter());
    }
}
