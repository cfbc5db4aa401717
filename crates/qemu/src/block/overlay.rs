//! The steps of an overlay: create, mark, merge, remove, end.
//!
//! The caller owns the files and their order on disk.

use super::BlockError;
use super::graph::{BlockGraph, OverlayChain, read_nodes};
use super::jobs::{self, Job};
use super::names::OverlayName;
use crate::qmp::{Qmp, QmpError};
use crate::stopped::Stopped;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Size of a cluster of an overlay. It is divided into 32 parts of 4 KiB, each of which can be in the overlay or not: a
/// write of 4 KiB does not have to copy its surroundings from the disk below.
pub const CLUSTER_BYTES: u64 = 128 << 10;
/// Limit for writing the header of an overlay. It usually takes 10 ms.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for the last part of a merge of the newest overlay, which QEMU copies while the guest is stopped.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes an overlay for `chain` out of the empty file at `file`, which QEMU's user can open. The guest may run; the
/// overlay is not used before [`mark`].
///
/// # Errors
/// If the disk is read-only, or QEMU cannot write the file.
///
/// *On failure:* no node of this overlay exists. The file may have any content.
pub fn create(qmp: &mut Qmp, chain: &OverlayChain, name: OverlayName, file: &Path) -> Result<(), BlockError> {
    remove_unused(qmp, name)?;
    let created = try_create(qmp, chain, name, file);
    if created.is_err() {
        jobs::cancel(qmp, &name.create_job())?;
        remove_unused(qmp, name)?;
    }
    created
}

fn try_create(qmp: &mut Qmp, chain: &OverlayChain, name: OverlayName, file: &Path) -> Result<(), BlockError> {
    let graph = BlockGraph::read(qmp)?;
    let (base, top) = (graph.node(&chain.base)?, graph.node(&chain.top())?);
    if top.read_only {
        return Err(BlockError::ReadOnly { device: chain.device.clone() });
    }
    let cache = json!({"direct": base.cache.direct, "no-flush": base.cache.no_flush});
    let file_node = json!({"driver": "file", "filename": file, "node-name": name.file_node(), "cache": cache,
        "discard": "unmap"});
    qmp.execute::<Value>("blockdev-add", file_node)?;
    // `blockdev-snapshot` writes no name of the disk below into the header: without it, no other program could open the
    // chain after a crash.
    let image = json!({"driver": "qcow2", "file": name.file_node(), "size": top.size, "lazy-refcounts": true,
        "cluster-size": CLUSTER_BYTES, "extended-l2": true,
        "backing-file": top.file, "backing-fmt": top.driver});
    qmp.execute::<Value>("blockdev-create", json!({"job-id": name.create_job(), "options": image}))?;
    jobs::finish(qmp, &name.create_job(), CREATE_TIMEOUT)?;
    // `blockdev-snapshot` rejects an overlay that has a disk below already.
    let node = json!({"driver": "qcow2", "file": name.file_node(), "node-name": name.node(), "backing": null,
        "cache": cache, "discard": "unmap", "detect-zeroes": base.detect_zeroes});
    qmp.execute::<Value>("blockdev-add", node)?;
    Ok(())
}

/// A chain, and the overlay to put on it.
#[derive(Debug)]
pub struct Mark<'c> {
    pub chain: &'c OverlayChain,
    pub overlay: OverlayName,
}

/// Puts an overlay on each of the disks: on all of them, or on none. QEMU flushes the nodes below. It would accept an
/// overlay of another size, and the guest's disk would change with it: therefore the sizes are compared here.
///
/// # Errors
/// If a job uses one of the disks, also a merge of ours; [`BlockError::Resized`] if the disk was resized after
/// [`create`], which is then repeated for the next mark.
pub fn mark(stopped: &mut Stopped<'_>, marks: &[Mark<'_>]) -> Result<(), BlockError> {
    let Some(qmp) = stopped.qmp() else { return Ok(()) };
    let nodes = read_nodes(qmp)?;
    let size = |name: &str| nodes.get(name).map(|node| node.size);
    if let Some(Mark { chain, .. }) = marks.iter().find(|mark| size(&mark.chain.top()) != size(&mark.overlay.node())) {
        return Err(BlockError::Resized { device: chain.device.clone() });
    }
    let action = |Mark { chain, overlay }: &Mark<'_>| {
        let data = json!({"node": chain.top(), "overlay": overlay.node()});
        json!({"type": "blockdev-snapshot", "data": data})
    };
    let actions: Vec<Value> = marks.iter().map(action).collect();
    Ok(qmp.execute::<Value>("transaction", json!({"actions": actions})).map(drop)?)
}

/// Starts to merge the overlays up to `up_to`, which is not the top one, into the base. [`finish_merge`] ends it, and
/// [`jobs::cancel`] with [`OverlayName::merge_job`] stops it. `speed`: bytes per second, 0 for no limit.
///
/// # Errors
/// If QEMU rejects it, for example because another job uses the disk.
pub fn start_merge(qmp: &mut Qmp, chain: &OverlayChain, up_to: OverlayName, speed: u64) -> Result<(), BlockError> {
    let mut arguments = json!({"job-id": up_to.merge_job(), "device": chain.top(), "top-node": up_to.node(),
        "base-node": chain.base, "speed": speed, "on-error": "report", "auto-dismiss": false,
        "filter-node-name": up_to.merge_filter()});
    // A base without a format node would otherwise be recorded as a disk of format `file`.
    const MASK: &str = "backing-mask-protocol";
    if has_argument(qmp, "block-commit", MASK)?
        && let Some(arguments) = arguments.as_object_mut()
    {
        arguments.insert(MASK.into(), true.into());
    }
    Ok(qmp.execute::<Value>("block-commit", arguments).map(drop)?)
}

/// Cancels the end of a disk's overlays that an earlier process has started, as long as it can be cancelled. After that, the
/// graph shows for certain where the device is.
///
/// # Errors
/// When QEMU does not answer, or does not end the job.
pub fn cancel_end(qmp: &mut Qmp, disk: u16) -> Result<(), BlockError> {
    jobs::cancel(qmp, &OverlayName { disk, epoch: 0 }.end_job()).map(drop)
}

/// Waits for the end of a merge. On success the overlays are out of the chain, and QEMU has flushed the base. The
/// caller still syncs the file of the base, which QEMU does not with `cache=unsafe`, and then calls [`remove_unused`].
///
/// # Errors
/// [`BlockError::JobTimeout`] if it still runs; [`BlockError::JobFailed`] if the base or the overlay cannot be read or
/// written; [`BlockError::BaseNotFlushed`], also if repeated. The overlays are needed in all these cases.
pub fn finish_merge(
    qmp: &mut Qmp,
    chain: &OverlayChain,
    up_to: OverlayName,
    timeout: Duration,
) -> Result<(), BlockError> {
    jobs::finish_checked(qmp, &up_to.merge_job(), timeout, |qmp| {
        // QEMU makes the base read-only again at the end of the job, which fails if a flush fails. It reports that
        // nowhere.
        match BlockGraph::read(qmp)?.node(&chain.base)?.read_only {
            true => Ok(()),
            false => Err(BlockError::BaseNotFlushed { base: chain.base.clone() }),
        }
    })
}

/// Starts to merge all overlays, also the one that the guest writes to, and waits until QEMU has copied them while the
/// guest runs. [`end`] does the rest. No other merge may run.
///
/// # Errors
/// [`BlockError::JobTimeout`] if the guest writes faster than QEMU copies. The device stays on its overlay.
pub fn prepare_end(qmp: &mut Qmp, chain: &OverlayChain, timeout: Duration) -> Result<(), BlockError> {
    let Some(top) = chain.overlays.last() else { return Ok(()) };
    let job = top.end_job();
    // An earlier process may have been killed while it ended the overlays.
    jobs::cancel(qmp, &job)?;
    let arguments = json!({"job-id": job, "device": top.node(), "top-node": top.node(), "base-node": chain.base,
        "on-error": "report", "auto-dismiss": false, "filter-node-name": top.merge_filter()});
    qmp.execute::<Value>("block-commit", arguments)?;
    // A job that ends now has failed; `end` reports why.
    let ready = jobs::wait_until(qmp, &job, timeout, |job| job.status == jobs::READY || job.is_concluded());
    ready.map(drop).inspect_err(|_| {
        if let Err(e) = jobs::cancel(qmp, &job) {
            tracing::warn!(job, error = %e, "cannot cancel a block job");
        }
    })
}

/// Puts the device back on its base, which then has all writes, and removes the nodes of the overlays.
///
/// The guest must stay stopped until the caller has recorded that the overlays are merged: what the guest flushes after
/// that is in the base, below overlays that would hide it after a crash.
///
/// # Errors
/// [`BlockError::EndUnknown`]: the device may be on either, so the guest must stay stopped. Any other error: the device
/// is on its overlay.
pub fn end(stopped: &mut Stopped<'_>, chain: &OverlayChain) -> Result<(), BlockError> {
    let (Some(qmp), Some(top)) = (stopped.qmp(), chain.overlays.last()) else { return Ok(()) };
    let completed = complete(qmp, &top.end_job());
    // After an error, also a lost answer, QEMU may nevertheless have put the device on its base: its graph decides.
    let now = top_after_end(qmp, chain, completed.is_err())
        .map_err(|e| BlockError::EndUnknown { device: chain.device.clone(), source: Box::new(e) })?;
    if now != chain.base {
        let (device, base) = (chain.device.clone(), chain.base.clone());
        return Err(completed.err().unwrap_or(BlockError::NotOnBase { device, base, actual: now }));
    }
    for overlay in chain.overlays.iter().rev() {
        // Nodes without a device do no harm, and the caller must be able to record the end.
        if let Err(e) = remove_unused(qmp, *overlay) {
            tracing::warn!(node = overlay.node(), error = %e, "cannot remove a block node");
        }
    }
    Ok(())
}

/// Returns the node that the device is on. After a failure, first makes sure that the job cannot move it any more.
fn top_after_end(qmp: &mut Qmp, chain: &OverlayChain, has_failed: bool) -> Result<String, BlockError> {
    if let Some(top) = chain.overlays.last().filter(|_| has_failed) {
        jobs::cancel(qmp, &top.end_job())?;
    }
    Ok(BlockGraph::read(qmp)?.chain_of(&chain.device)?.top())
}

fn complete(qmp: &mut Qmp, job: &str) -> Result<(), BlockError> {
    let is_ready = Job::find(qmp, job)?.is_some_and(|job| !job.is_concluded());
    if is_ready {
        qmp.execute::<Value>("job-complete", json!({"id": job}))?;
    }
    jobs::finish(qmp, job, COMPLETE_TIMEOUT)
}

/// Removes the nodes of an overlay that is on no disk, if they exist.
///
/// # Errors
/// If QEMU uses them.
pub fn remove_unused(qmp: &mut Qmp, name: OverlayName) -> Result<(), BlockError> {
    let graph = BlockGraph::read(qmp)?;
    for node in [name.node(), name.file_node()] {
        if graph.has_node(&node) {
            qmp.execute::<Value>("blockdev-del", json!({"node-name": node}))?;
        }
    }
    Ok(())
}

/// Returns whether this QEMU knows an argument of a command.
fn has_argument(qmp: &mut Qmp, command: &str, argument: &str) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    struct SchemaEntry {
        name: String,
        #[serde(rename = "arg-type", default)]
        arguments: String,
        #[serde(default)]
        members: Vec<Member>,
    }
    #[derive(Deserialize)]
    struct Member {
        #[serde(default)]
        name: String,
    }
    let schema: Vec<SchemaEntry> = qmp.execute("query-qmp-schema", ())?;
    let arguments = schema.iter().find(|entry| entry.name == command).map(|entry| entry.arguments.as_str());
    let members = schema.iter().find(|entry| Some(entry.name.as_str()) == arguments).map(|entry| &entry.members);
    Ok(members.is_some_and(|members| members.iter().any(|member| member.name == argument)))
}
