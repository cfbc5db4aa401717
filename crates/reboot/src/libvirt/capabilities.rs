//! libvirt's names of a QEMU's features. The daemon records those of the QEMU that it has started, and does not search
//! for them again when it connects to a running one. With the features of another version it would use commands that the
//! destination does not have.
//!
//! Only names of this daemon are used, from its cache of probed binaries: it forgets a domain with a name that it does
//! not know.

use super::DomainError;
use rekindle_kernel::output::within;
use roxmltree::Document;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where the daemon has a file for each binary that it has probed.
const CACHE: &str = "/var/cache/libvirt/qemu/capabilities";
/// Limit of such a file. Those of libvirt 9 to 11 have less than 400 KiB.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// How long the daemon may take to probe a binary.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of what `virsh` prints about a binary: all CPU models that it has.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// Returns the features to record for a domain that goes from the binary `old`, with the features `recorded`, to `new`.
///
/// libvirt has left out some of the old binary's features for this domain's machine. So the differences between the two
/// binaries are applied to what it has recorded.
pub(super) fn after_change(
    recorded: &BTreeSet<String>,
    old: &Path,
    new: &Path,
    accelerator: &str,
) -> Result<BTreeSet<String>, DomainError> {
    probe(new, accelerator)?;
    let missing = || {
        let source = io::Error::other(format!("libvirt has not probed {}", new.display()));
        DomainError::File { path: CACHE.into(), source }
    };
    let new_features = cached(new)?.ok_or_else(missing)?;
    Ok(match cached(old)?.filter(|_| old != new) {
        Some(old_features) => {
            let removed: BTreeSet<_> = old_features.difference(&new_features).collect();
            let added = new_features.difference(&old_features);
            recorded.iter().filter(|name| !removed.contains(name)).chain(added).cloned().collect()
        }
        // The binary was replaced by another one of the same name.
        None => new_features,
    })
}

/// Makes the daemon probe a binary.
fn probe(binary: &Path, accelerator: &str) -> Result<(), DomainError> {
    let failed = |source| DomainError::File { path: binary.to_owned(), source };
    let kind = if accelerator == "kvm" { "kvm" } else { "qemu" };
    let mut command = Command::new("virsh");
    command.args(["--connect", "qemu:///system", "domcapabilities", "--virttype", kind, "--emulatorbin"]);
    command.arg(binary).stdin(Stdio::null());
    let output = within(&mut command, MAX_OUTPUT_BYTES, Instant::now() + PROBE_TIMEOUT).map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.err).trim().to_owned();
    Err(failed(io::Error::other(format!("libvirt cannot use it: {message}"))))
}

/// Returns the features of a binary from the daemon's cache.
fn cached(binary: &Path) -> Result<Option<BTreeSet<String>>, DomainError> {
    let failed = |source| DomainError::File { path: CACHE.into(), source };
    for entry in fs::read_dir(CACHE).map_err(failed)? {
        let path: PathBuf = entry.map_err(failed)?.path();
        if fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_FILE_BYTES) {
            continue;
        }
        // The daemon may be replacing the file.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if let Some((emulator, features)) = parse(&text)
            && Path::new(&emulator) == binary
        {
            return Ok(Some(features));
        }
    }
    Ok(None)
}

/// Returns the binary and its features.
fn parse(text: &str) -> Option<(String, BTreeSet<String>)> {
    let document = Document::parse(text).ok()?;
    let root = document.root_element();
    let emulator = root.children().find(|node| node.has_tag_name("emulator"))?.text()?.trim().to_owned();
    let flags = root.children().filter(|node| node.has_tag_name("flag"));
    Some((emulator, flags.filter_map(|flag| flag.attribute("name").map(str::to_owned)).collect()))
}
