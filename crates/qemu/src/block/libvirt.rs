//! The steps of an overlay by libvirt's calls, so that libvirt's record of the domain's disks stays true.
//!
//! libvirt gives the nodes of an overlay its own names, and recognises overlays by their files. Its block job of a disk
//! such as `vda` has an id that starts with `commit-vda-` in QEMU.

use super::BlockError;
use super::graph::{OverlayChain, read_nodes};
use super::jobs::{self, Job};
use crate::libvirt::LibvirtCall;
use crate::qmp::{Qmp, QmpError};
use crate::stopped::Stopped;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limit for the end of a block job that was cancelled.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A disk and the overlay to put on it.
#[derive(Debug)]
pub struct LibvirtMark<'m> {
    pub chain: &'m OverlayChain,
    /// libvirt's name of the disk.
    pub target: &'m str,
    /// The overlay, whose header names the disk below.
    pub file: &'m Path,
    /// Length of the disk for which the overlay was made.
    pub bytes: u64,
}

/// Makes a call, which takes this step.
fn make(call: &LibvirtCall, qmp: &mut Qmp, step: &'static str) -> Result<Value, BlockError> {
    call.make(qmp).map_err(|e| match e {
        QmpError::Refused { description, .. } => BlockError::LibvirtRejected { step, message: description },
        e => e.into(),
    })
}

/// Returns the XML of a running domain, or (`is_inactive`) the one with which libvirt starts it next time.
///
/// # Errors
/// When libvirt does not answer.
pub fn domain_xml(qmp: &mut Qmp, is_inactive: bool) -> Result<String, BlockError> {
    let value = make(&LibvirtCall::Xml { inactive: is_inactive }, qmp, "describe the domain")?;
    Ok(value.as_str().unwrap_or_default().to_owned())
}

/// Puts an overlay on each of the disks: on all of them, or on none. `others`: libvirt's names of all other disks of the
/// domain, for which libvirt would make overlays of its own.
///
/// # Errors
/// If libvirt rejects it, for example because a job uses one of the disks; [`BlockError::Resized`] if a disk was resized
/// after its overlay was made.
pub fn mark(qmp: &mut Qmp, marks: &[LibvirtMark<'_>], others: &[String]) -> Result<(), BlockError> {
    let nodes = read_nodes(qmp)?;
    let is_resized = |mark: &&LibvirtMark<'_>| nodes.get(&mark.chain.top()).map(|node| node.size) != Some(mark.bytes);
    if let Some(LibvirtMark { chain, .. }) = marks.iter().find(is_resized) {
        return Err(BlockError::Resized { device: chain.device.clone() });
    }
    let call = LibvirtCall::PutOverlays { xml: snapshot_xml(marks, others) };
    make(&call, qmp, "put overlays on the disks").map(drop)
}

fn snapshot_xml(marks: &[LibvirtMark<'_>], others: &[String]) -> String {
    let disk = |LibvirtMark { target, file, .. }: &LibvirtMark<'_>| {
        format!(
            "<disk name='{}' snapshot='external' type='file'><driver type='qcow2'/><source file='{}'/></disk>",
            escaped(target),
            escaped(&file.to_string_lossy())
        )
    };
    let other = |target: &String| format!("<disk name='{}' snapshot='no'/>", escaped(target));
    let disks: String = marks.iter().map(disk).chain(others.iter().map(other)).collect();
    format!("<domainsnapshot><disks>{disks}</disks></domainsnapshot>")
}

/// Returns a text as the value of an attribute in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

/// Starts to merge the overlays up to the file `top` into the file `base`; without `top`, all of them.
///
/// # Errors
/// If libvirt or QEMU rejects it.
pub fn start_merge(qmp: &mut Qmp, target: &str, base: &Path, top: Option<&Path>, speed: u64) -> Result<(), BlockError> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (disk, base, top) = (target.to_owned(), text(base), top.map(text));
    make(&LibvirtCall::StartCommit { disk, base, top, speed }, qmp, "merge overlays").map(drop)
}

/// Returns the merge of this disk in QEMU, which runs or has ended and was not processed by libvirt yet.
///
/// # Errors
/// When QEMU does not answer.
pub fn merge_of(qmp: &mut Qmp, target: &str) -> Result<Option<Job>, QmpError> {
    Ok(jobs::libvirt_merge(&Job::list(qmp)?, target).cloned())
}

/// Ends a merge of this disk, if there is one. The disk stays on its overlays.
///
/// # Errors
/// When libvirt does not answer, or does not end the job.
pub fn cancel_merge(qmp: &mut Qmp, target: &str) -> Result<(), BlockError> {
    let Some(job) = merge_of(qmp, target)? else { return Ok(()) };
    match (LibvirtCall::EndBlockJob { disk: target.into(), pivot: false }).make(qmp) {
        // It has ended.
        Ok(_) | Err(QmpError::Refused { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    if is_ended(qmp, target, CANCEL_TIMEOUT)? {
        return Ok(());
    }
    Err(BlockError::JobTimeout { job: job.id, after: CANCEL_TIMEOUT })
}

/// Waits until QEMU has no merge of this disk. Returns whether there is none.
///
/// # Errors
/// When QEMU does not answer.
pub fn is_ended(qmp: &mut Qmp, target: &str, timeout: Duration) -> Result<bool, QmpError> {
    let deadline = Instant::now() + timeout;
    while merge_of(qmp, target)?.is_some() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

/// Waits until a merge of all overlays has copied them, while the guest runs. [`pivot`] does the rest.
///
/// # Errors
/// [`BlockError::JobTimeout`] if the guest writes faster than QEMU copies; the job runs. [`BlockError::JobVanished`] if
/// it has failed: libvirt does not report why.
pub fn wait_copied(qmp: &mut Qmp, target: &str, timeout: Duration) -> Result<(), BlockError> {
    let vanished = || BlockError::JobVanished { job: format!("commit-{target}") };
    let job = merge_of(qmp, target)?.ok_or_else(vanished)?;
    jobs::wait_until(qmp, &job.id, timeout, |job| job.status == jobs::READY).map(drop)
}

/// Puts the disk on the file into which [`wait_copied`] has seen all overlays copied.
///
/// # Errors
/// The disk may be on either.
pub fn pivot(stopped: &mut Stopped<'_>, target: &str) -> Result<(), BlockError> {
    let Some(qmp) = stopped.qmp() else { return Ok(()) };
    make(&LibvirtCall::EndBlockJob { disk: target.into(), pivot: true }, qmp, "put the disk on its image").map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn all_disks_are_listed_and_names_are_quoted() {
        let chain = OverlayChain {
            device: "d".into(),
            base: "b".into(),
            overlays: Vec::new(),
            is_merging: false,
            top_node: "b".into(),
        };
        let mark = LibvirtMark { chain: &chain, target: "vda", file: Path::new("/it's <&>"), bytes: 1 };
        let xml = snapshot_xml(&[mark], &["sda".into()]);
        assert!(xml.contains("<source file='/it&apos;s &lt;&amp;>'/>"), "{xml}");
        assert!(xml.contains("<disk name='sda' snapshot='no'/>"), "{xml}");
    }
}
