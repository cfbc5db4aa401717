//! The block nodes of a QEMU and libvirt's record of the disks, read once until something changes them.
//!
//! Reading them takes QEMU's main loop several milliseconds, in which it serves no disk of the guest.

use super::OverlayDisksError;
use rekindle_libvirt::disks::{self, DomainDisk};
use rekindle_qemu::block::BlockError;
use rekindle_qemu::block::graph::BlockGraph;
use rekindle_qemu::block::libvirt;
use rekindle_qemu::qmp::Qmp;
use std::rc::Rc;

/// Which of libvirt's descriptions of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Description {
    Running,
    /// With which libvirt starts the domain next time.
    NextStart,
}

/// Nodes, jobs and libvirt's record. What was read is valid until [`DiskView::monitor_to_change`] or [`DiskView::forget`].
pub(super) struct DiskView<'q> {
    qmp: &'q mut Qmp,
    seen: Seen,
}

#[derive(Default)]
struct Seen {
    graph: Option<Rc<BlockGraph>>,
    running: Option<Rc<[DomainDisk]>>,
    next_start: Option<Rc<[DomainDisk]>>,
}

impl<'q> DiskView<'q> {
    pub fn new(qmp: &'q mut Qmp) -> Self {
        Self { qmp, seen: Seen::default() }
    }

    pub fn graph(&mut self) -> Result<Rc<BlockGraph>, BlockError> {
        match &self.seen.graph {
            Some(graph) => Ok(Rc::clone(graph)),
            None => Ok(Rc::clone(self.seen.graph.insert(Rc::new(BlockGraph::read(self.qmp)?)))),
        }
    }

    /// Returns libvirt's record of the domain's disks.
    pub fn domain_disks(&mut self, description: Description) -> Result<Rc<[DomainDisk]>, OverlayDisksError> {
        let seen = match description {
            Description::Running => &mut self.seen.running,
            Description::NextStart => &mut self.seen.next_start,
        };
        match seen {
            Some(disks) => Ok(Rc::clone(disks)),
            None => Ok(Rc::clone(seen.insert(read_domain_disks(self.qmp, description)?.into()))),
        }
    }

    /// Returns the monitor for a command that changes the nodes, or for a wait until they have changed.
    pub fn monitor_to_change(&mut self) -> &mut Qmp {
        self.forget();
        self.qmp
    }

    /// Lets the next call read again what another program may have changed.
    pub fn forget(&mut self) {
        self.seen = Seen::default();
    }
}

/// Reads libvirt's record of a domain's disks.
pub(super) fn read_domain_disks(qmp: &mut Qmp, description: Description) -> Result<Vec<DomainDisk>, OverlayDisksError> {
    let xml = libvirt::domain_xml(qmp, description == Description::NextStart)?;
    disks::of_domain(&xml).map_err(|problem| OverlayDisksError::DomainXml { problem })
}
