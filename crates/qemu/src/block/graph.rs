//! The block nodes of a QEMU: which node a device is on, and what is below.
//!
//! Node names that start with `rk-`, `rks-` or `rkf-` are Rekindle's. QEMU reports no list of children, therefore the
//! order of the nodes is read from `query-blockstats`, whose entries are nested as the nodes are.

use super::BlockError;
use super::jobs::{self, Job, is_own_job};
use super::names::{OverlayName, is_overlay_file};
use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// Drivers that pass requests on to another node. QEMU merges into none of them.
const FILTER_DRIVERS: [&str; 8] =
    ["throttle", "copy-on-read", "compress", "preallocate", "blkdebug", "blklogwrites", "blkverify", "blkreplay"];

/// Drivers of the nodes that QEMU inserts while it merges.
const ACTIVE_MERGE_FILTER: &str = "mirror_top";
const MERGE_FILTERS: [&str; 2] = ["commit_top", ACTIVE_MERGE_FILTER];

/// One node as QEMU describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockNode {
    pub driver: String,
    /// File name, or a `json:` description if there is none.
    pub file: String,
    pub read_only: bool,
    /// Bytes of the disk that the node presents.
    pub size: u64,
    pub cache: CacheMode,
    /// `off`, `on` or `unmap`.
    pub detect_zeroes: String,
}

/// How a node caches, as QEMU's `cache.direct` and `cache.no-flush`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheMode {
    pub direct: bool,
    #[serde(rename = "no-flush")]
    pub no_flush: bool,
}

/// The node that QEMU inserts while it merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeFilter<'g> {
    /// The newest file that is merged.
    pub merged_file: &'g str,
    /// Whether that is the file that the guest writes to.
    pub is_active: bool,
}

/// The nodes of one device, from the base upwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayChain {
    /// QEMU's path of the device, as `query-block` reports it.
    pub device: String,
    /// Node of the disk when no overlay is on it.
    pub base: String,
    /// Lowest first. The guest writes to the last.
    pub overlays: Vec<OverlayName>,
    /// Whether the filter of a running merge is in the chain.
    pub is_merging: bool,
    /// The node that the device is on.
    pub top_node: String,
}

impl OverlayChain {
    /// Returns the name of the node that the device is on.
    #[must_use]
    pub fn top(&self) -> String {
        self.top_node.clone()
    }
}

/// Nodes by name.
pub(crate) type BlockNodes = BTreeMap<String, BlockNode>;

/// Devices, nodes and jobs of a QEMU at one moment.
#[derive(Debug)]
pub struct BlockGraph {
    /// The nodes below each device, the device's own first, by QEMU's path of the device.
    devices: BTreeMap<String, Vec<String>>,
    nodes: BlockNodes,
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct NodeInfo {
    #[serde(rename = "node-name")]
    name: String,
    #[serde(rename = "drv")]
    driver: String,
    file: String,
    #[serde(rename = "ro")]
    read_only: bool,
    image: ImageInfo,
    cache: CacheMode,
    detect_zeroes: String,
}

#[derive(Deserialize)]
struct ImageInfo {
    #[serde(rename = "virtual-size")]
    virtual_size: u64,
}

/// An entry of `query-blockstats`: a node, and the node below it.
#[derive(Deserialize)]
struct NestedNode {
    #[serde(rename = "qdev")]
    device: Option<String>,
    #[serde(rename = "node-name")]
    name: Option<String>,
    backing: Option<Box<NestedNode>>,
}

/// Reads the nodes alone, for use while the guest is stopped.
pub(crate) fn read_nodes(qmp: &mut Qmp) -> Result<BlockNodes, QmpError> {
    Ok(by_name(qmp.execute("query-named-block-nodes", json!({"flat": true}))?))
}

fn by_name(nodes: Vec<NodeInfo>) -> BlockNodes {
    let described = |NodeInfo { name, driver, file, read_only, image, cache, detect_zeroes }| {
        (name, BlockNode { driver, file, read_only, size: image.virtual_size, cache, detect_zeroes })
    };
    nodes.into_iter().map(described).collect()
}

impl BlockGraph {
    /// Reads jobs, nodes and devices, in this order: a merge that is not listed has ended, and the nodes show that.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn read(qmp: &mut Qmp) -> Result<Self, BlockError> {
        let jobs = Job::list(qmp)?;
        let nested: Vec<NestedNode> = qmp.execute("query-blockstats", ())?;
        Ok(Self::from_parts(nested, read_nodes(qmp)?, jobs))
    }

    fn from_parts(nested: Vec<NestedNode>, nodes: BlockNodes, jobs: Vec<Job>) -> Self {
        let device_nodes = |top: NestedNode| {
            let device = top.device.clone().filter(|device| !device.is_empty())?;
            let below = std::iter::successors(Some(&top), |node| node.backing.as_deref());
            Some((device, below.filter_map(|node| node.name.clone()).collect()))
        };
        Self { devices: nested.into_iter().filter_map(device_nodes).collect(), nodes, jobs }
    }

    /// Returns the devices that have a medium, by QEMU's path.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().filter(|(_, nodes)| !nodes.is_empty()).map(|(device, _)| device.as_str())
    }

    /// Returns the description of a node.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn node(&self, name: &str) -> Result<&BlockNode, BlockError> {
        self.nodes.get(name).ok_or_else(|| BlockError::IncompleteNode { node: name.into() })
    }

    #[must_use]
    pub fn has_node(&self, name: &str) -> bool {
        self.nodes.contains_key(name)
    }

    /// Returns the overlays of a disk that QEMU has, whether or not a device is on them.
    pub fn overlays_of(&self, disk: u16) -> impl Iterator<Item = OverlayName> {
        self.nodes.keys().filter_map(|name| OverlayName::from_node(name)).filter(move |overlay| overlay.disk == disk)
    }

    /// Returns whether any device is on an overlay.
    #[must_use]
    pub fn has_overlays(&self) -> bool {
        self.devices.values().flatten().any(|node| OverlayName::from_node(node).is_some())
    }

    /// Returns the jobs that are not Rekindle's. While there is one, no mark and no merge may start.
    pub fn foreign_jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter().filter(|job| !is_own_job(&job.id))
    }

    /// Returns the merge of this disk that runs or has ended undismissed, as an earlier process may have left it.
    #[must_use]
    pub fn merge_of(&self, disk: u16) -> Option<OverlayName> {
        let prefix = OverlayName::merge_job_prefix(disk);
        let epoch = self.jobs.iter().find_map(|job| job.id.strip_prefix(&prefix)?.parse().ok())?;
        Some(OverlayName { disk, epoch })
    }

    /// Returns libvirt's merge of this disk, which runs, or has ended and was not processed by libvirt yet.
    #[must_use]
    pub fn libvirt_merge_of(&self, target: &str) -> Option<&Job> {
        jobs::libvirt_merge(&self.jobs, target)
    }

    /// Returns base and overlays of a device.
    ///
    /// # Errors
    /// If the device has a node of another program above an overlay, a filter, or no medium.
    pub fn chain_of(&self, device: &str) -> Result<OverlayChain, BlockError> {
        let unknown = || BlockError::UnknownDevice { device: device.into() };
        let names = self.devices.get(device).ok_or_else(unknown)?;
        let is_own = |name: &&String| OverlayName::from_node(name).is_some() || OverlayName::is_merge_filter(name);
        let (own, below): (Vec<_>, Vec<_>) =
            (names.iter().take_while(is_own).collect(), names.iter().skip_while(is_own).collect());
        let base = *below.first().ok_or_else(unknown)?;
        if below.iter().any(is_own) {
            return Err(BlockError::ForeignNode { device: device.into(), node: base.clone() });
        }
        let driver = &self.node(base)?.driver;
        if FILTER_DRIVERS.contains(&driver.as_str()) {
            let (device, node, driver) = (device.into(), base.clone(), driver.clone());
            return Err(BlockError::Filter { device, node, driver });
        }
        let is_merging = own.iter().any(|name| OverlayName::is_merge_filter(name));
        let overlays: Vec<_> = own.iter().rev().filter_map(|name| OverlayName::from_node(name)).collect();
        let top_node = overlays.last().map_or_else(|| base.clone(), OverlayName::node);
        Ok(OverlayChain { device: device.into(), base: base.clone(), overlays, is_merging, top_node })
    }

    /// Returns base and overlays of a device whose overlays were put by libvirt. Their nodes have names of libvirt's,
    /// so `overlay_of` recognises them by their files.
    ///
    /// # Errors
    /// As [`BlockGraph::chain_of`].
    pub fn chain_by_files(
        &self,
        device: &str,
        overlay_of: impl Fn(&str) -> Option<OverlayName>,
    ) -> Result<OverlayChain, BlockError> {
        let unknown = || BlockError::UnknownDevice { device: device.into() };
        let names = self.devices.get(device).ok_or_else(unknown)?;
        let found: Vec<(&String, Option<OverlayName>)> = names
            .iter()
            .filter(|name| self.nodes.get(*name).is_some_and(|node| !MERGE_FILTERS.contains(&node.driver.as_str())))
            .map(|name| (name, self.nodes.get(name).and_then(|node| overlay_of(&node.file))))
            .collect();
        let own_count = found.iter().take_while(|(_, overlay)| overlay.is_some()).count();
        let (own, below) = found.split_at(own_count);
        let (base, _) = below.first().ok_or_else(unknown)?;
        if below.iter().any(|(_, overlay)| overlay.is_some()) {
            return Err(BlockError::ForeignNode { device: device.into(), node: (*base).clone() });
        }
        let driver = &self.node(base)?.driver;
        if FILTER_DRIVERS.contains(&driver.as_str()) {
            let (device, node, driver) = (device.into(), (*base).clone(), driver.clone());
            return Err(BlockError::Filter { device, node, driver });
        }
        let overlays = own.iter().rev().filter_map(|(_, overlay)| *overlay).collect();
        let top = own.first().map_or(base, |(name, _)| name);
        let (base, top_node) = ((*base).clone(), (*top).clone());
        Ok(OverlayChain { device: device.into(), base, overlays, is_merging: false, top_node })
    }

    /// Returns the nodes of a device, its own first.
    pub fn nodes_of(&self, device: &str) -> impl Iterator<Item = &str> {
        self.devices.get(device).into_iter().flatten().map(String::as_str)
    }

    /// Returns whether the file of a node has the name of an overlay, or the node is the filter of a merge.
    #[must_use]
    pub fn is_overlay_file(&self, node: &str) -> bool {
        let is_own = |node: &BlockNode| is_overlay_file(&node.file) || MERGE_FILTERS.contains(&node.driver.as_str());
        self.nodes.get(node).is_some_and(is_own)
    }

    /// Returns the filters of all merges that run.
    pub fn merge_filters(&self) -> impl Iterator<Item = MergeFilter<'_>> {
        let filters = self.nodes.values().filter(|node| MERGE_FILTERS.contains(&node.driver.as_str()));
        filters.map(|node| MergeFilter { merged_file: &node.file, is_active: node.driver == ACTIVE_MERGE_FILTER })
    }

    /// Returns the files of all nodes.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.nodes.values().map(|node| node.file.as_str())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Returns a graph of one device `vd0` with these nodes, the device's own first, as pairs of name and driver.
    fn graph(nodes: &[(&str, &str)]) -> BlockGraph {
        let node_info = |(name, driver): &(&str, &str)| {
            json!({"node-name": name, "drv": driver, "file": "/disk", "ro": false, "image": {"virtual-size": 4096},
                "cache": {"direct": false, "no-flush": false, "writeback": true}, "detect_zeroes": "off"})
        };
        let infos: Vec<Value> = nodes.iter().map(node_info).collect();
        let nest = |below: Value, (name, _): &(&str, &str)| json!({"node-name": name, "backing": below, "stats": {}});
        let mut device = nodes.iter().rev().fold(Value::Null, nest);
        device["qdev"] = json!("vd0");
        let parsed = |value: Vec<Value>| Value::from(value);
        BlockGraph::from_parts(
            serde_json::from_value(parsed(vec![device])).unwrap(),
            by_name(serde_json::from_value(parsed(infos)).unwrap()),
            serde_json::from_value(
                json!([{"id": "backup-vda", "status": "running"}, {"id": "rk-merge-0-1", "status": "ready"}]),
            )
            .unwrap(),
        )
    }

    #[test]
    fn a_chain_has_the_overlays_above_the_first_foreign_node() {
        let overlay = |epoch| OverlayName { disk: 0, epoch };
        let chain =
            graph(&[("rk-0-3", "qcow2"), ("rkf-0", "commit"), ("rk-0-2", "qcow2"), ("f0", "qcow2"), ("#b1", "raw")])
                .chain_of("vd0")
                .unwrap();
        let expected = OverlayChain {
            device: "vd0".into(),
            base: "f0".into(),
            overlays: vec![overlay(2), overlay(3)],
            is_merging: true,
            top_node: "rk-0-3".into(),
        };
        assert_eq!(chain, expected);
        assert_eq!(chain.top(), "rk-0-3");
        assert_eq!(graph(&[("f0", "raw")]).chain_of("vd0").unwrap().top(), "f0");
    }

    #[test]
    fn the_overlays_of_libvirt_are_recognised_by_their_files() {
        let overlay_of = |file: &str| file.strip_prefix("/e")?.parse().ok().map(|epoch| OverlayName { disk: 0, epoch });
        let with_files = |nodes: &[(&str, &str)]| {
            let drivers: Vec<_> = nodes.iter().map(|(name, _)| (*name, "qcow2")).collect();
            let mut graph = graph(&drivers);
            for (name, file) in nodes {
                graph.nodes.get_mut(*name).unwrap().file = (*file).into();
            }
            graph
        };
        let chain = with_files(&[("l9", "/e3"), ("l4", "/e2"), ("l1", "/disk")]).chain_by_files("vd0", overlay_of);
        let chain = chain.unwrap();
        assert_eq!(chain.overlays.iter().map(|overlay| overlay.epoch).collect::<Vec<_>>(), [2, 3]);
        assert_eq!((chain.base.as_str(), chain.top().as_str()), ("l1", "l9"));
        let foreign = with_files(&[("l9", "/user"), ("l4", "/e2"), ("l1", "/disk")]).chain_by_files("vd0", overlay_of);
        assert!(matches!(foreign, Err(BlockError::ForeignNode { node, .. }) if node == "l9"));
        let pulled = with_files(&[("l9", "/e3")]).chain_by_files("vd0", overlay_of);
        assert!(matches!(pulled, Err(BlockError::UnknownDevice { .. })));
    }

    #[test]
    fn nodes_that_would_make_a_merge_wrong_are_named() {
        let foreign = graph(&[("snap", "qcow2"), ("rk-0-1", "qcow2"), ("f0", "raw")]).chain_of("vd0");
        assert!(matches!(foreign, Err(BlockError::ForeignNode { node, .. }) if node == "snap"));
        let throttled = graph(&[("limit", "throttle"), ("f0", "raw")]).chain_of("vd0");
        assert!(matches!(throttled, Err(BlockError::Filter { driver, .. }) if driver == "throttle"));
        assert!(matches!(graph(&[]).chain_of("vd0"), Err(BlockError::UnknownDevice { .. })));
        assert!(matches!(graph(&[]).chain_of("vd1"), Err(BlockError::UnknownDevice { .. })));
    }

    #[test]
    fn jobs_of_other_programs_are_listed() {
        let graph = graph(&[]);
        assert_eq!(graph.foreign_jobs().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["backup-vda"]);
    }
}
