//! The names of the nodes and jobs of an overlay, by which a later process recognises them.
//!
//! The overlays of a disk are numbered by *epoch*, the time between two checkpoints: overlay 7 receives the guest's
//! writes after checkpoint 6, until the mark of checkpoint 7.

/// Returns whether a file has the name of an overlay, `epoch-000000000007.qcow2`. libvirt gives the nodes of such files
/// names of its own.
#[must_use]
pub fn is_overlay_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let digits = name.strip_prefix("epoch-").and_then(|name| name.strip_suffix(".qcow2"));
    digits.is_some_and(|digits| digits.len() >= 12 && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Which overlay: the number of the disk, and the epoch that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OverlayName {
    pub disk: u16,
    pub epoch: u64,
}

// QEMU limits a node name to 31 bytes; the longest of these has 30.
impl OverlayName {
    /// Returns the name of the node that presents the disk.
    #[must_use]
    pub fn node(&self) -> String {
        format!("rk-{}-{}", self.disk, self.epoch)
    }

    /// Returns the name of the node of the file.
    #[must_use]
    pub fn file_node(&self) -> String {
        format!("rks-{}-{}", self.disk, self.epoch)
    }

    /// Returns the overlay whose disk node has this name.
    #[must_use]
    pub fn from_node(node: &str) -> Option<Self> {
        let (disk, epoch) = node.strip_prefix("rk-")?.split_once('-')?;
        Some(Self { disk: disk.parse().ok()?, epoch: epoch.parse().ok()? })
    }

    /// Returns the id of the job that merges epochs up to this one.
    #[must_use]
    pub fn merge_job(&self) -> String {
        format!("{}{}", Self::merge_job_prefix(self.disk), self.epoch)
    }

    pub(super) fn merge_job_prefix(disk: u16) -> String {
        format!("rk-merge-{disk}-")
    }

    pub(super) fn create_job(&self) -> String {
        format!("rk-create-{}-{}", self.disk, self.epoch)
    }

    pub(super) fn end_job(&self) -> String {
        format!("rk-end-{}", self.disk)
    }

    /// Returns the name of the node that QEMU inserts while it merges.
    pub(super) fn merge_filter(&self) -> String {
        format!("rkf-{}", self.disk)
    }

    /// Returns whether the node with this name is one that QEMU inserts while it merges.
    #[must_use]
    pub fn is_merge_filter(node: &str) -> bool {
        node.strip_prefix("rkf-").is_some_and(|disk| disk.parse::<u16>().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_is_recognised_by_its_file_name() {
        assert!(is_overlay_file("/images/a.rekindle/epoch-000000000007.qcow2"));
        for other in ["/images/epoch-7.qcow2", "/epoch-000000000007.raw", "/epoch-00000000000x.qcow2", "disk"] {
            assert!(!is_overlay_file(other), "{other}");
        }
    }

    #[test]
    fn names_fit_into_qemus_limit_and_are_recognised() {
        let longest = OverlayName { disk: u16::MAX, epoch: u64::MAX };
        assert!(longest.file_node().len() < 32 && longest.node().len() < 32);
        assert_eq!(OverlayName::from_node(&longest.node()), Some(longest));
        for other in ["rk-merge-0-1", "rk-0", "rks-0-1", "rk-x-1", "rk-70000-1", "disk"] {
            assert_eq!(OverlayName::from_node(other), None, "{other}");
        }
        assert!(OverlayName::is_merge_filter(&longest.merge_filter()) && !OverlayName::is_merge_filter("rkf-x"));
    }
}
