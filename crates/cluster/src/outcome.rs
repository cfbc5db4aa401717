//! How a start ends.

use rekindle_handover::HandoverError;
use rekindle_kernel::process::Process;
use rekindle_life::attach::AttachError;
use rekindle_protect::owned::OwnError;
use rekindle_protect::restore::into_libvirt::RestoredIntoLibvirt;
use rekindle_protect::restore::{RestoreError, Restored};
use rekindle_protect::target::TargetError;
use rekindle_store::StoreError;
use rekindle_vm::definition::DefinitionErrors;
use rekindle_vm::error::LifeError;
use rekindle_vm::overlays::OverlayDisksError;
use serde::Serialize;
use std::fmt;
use std::io;
use uuid::Uuid;

/// A QEMU that runs the guest on this node, although the run directory does not have it: another program has started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrayQemu {
    pub domain: String,
    pub uuid: Uuid,
    pub process: Process,
}

impl fmt::Display for StrayQemu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, process, .. } = self;
        write!(f, "libvirt runs domain {domain} (process {}), and the cluster has not started it", process.pid)
    }
}

/// Why the VM does not run on this node.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Definition(#[from] DefinitionErrors),
    /// The definition has the name of another VM.
    #[error("the definition has the name {found}, but the resource is {name}: they must be the same")]
    Name { name: String, found: String },
    /// The store does not answer: it is unknown whether there is a checkpoint, and which node runs the guest.
    #[error("cannot determine its newest checkpoint")]
    Store(#[source] StoreError),
    /// The store does not exist. Its storage may not be mounted, and then a booted guest could be a second one.
    #[error(
        "{store} is not a store; is the shared storage mounted on this node? For a new VM create it, once, on one \
         node: rekindle store init {store}"
    )]
    NotAStore { store: String },
    /// The store does not exist or has no checkpoint, and the guest cannot be booted either.
    #[error("{store} has no checkpoint of it (is its storage mounted on this node?), and it cannot be booted")]
    NoStore {
        store: String,
        #[source]
        source: LifeError,
    },
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The guest cannot be booted.
    #[error(transparent)]
    Boot(HandoverError),
    /// This node cannot become owner of the store.
    #[error(transparent)]
    Own(#[from] OwnError),
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// A QEMU of the VM runs on this node and does not answer.
    #[error(
        "its QEMU runs on this node but does not answer; its guest may run, so no other QEMU is started: let the \
         cluster stop the resource, or resume the process"
    )]
    Silent,
    /// libvirt runs the domain, and the resource has not started it.
    #[error("{stray}, so it is not started again: let the cluster stop the resource, which shuts the guest down")]
    Stray { stray: StrayQemu },
    #[error("it may run on this node, so it is not started")]
    UnknownQemu(#[source] io::Error),
    /// libvirt on this node cannot start the domain.
    #[error("libvirt cannot start domain {domain} on this node: {why}")]
    Libvirt { domain: String, why: String },
    /// libvirt on this node does not know the domain.
    #[error(
        "libvirt on this node does not know domain {domain}, and {store} has no checkpoint from which it could be \
         defined: define it on each node (virsh define)"
    )]
    NotDefined { domain: String, store: String },
    #[error(
        "libvirt's daemon would start domain {domain} by itself, also while another node runs it: virsh autostart \
         --disable {domain}"
    )]
    Autostart { domain: String },
    /// The overlays of its disks cannot be merged.
    #[error(transparent)]
    Overlays(#[from] OverlayDisksError),
    /// The guest that libvirt has started cannot be protected.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The protector ended immediately.
    #[error("no checkpoints can be taken of it, so it was stopped again: {message}")]
    Unprotected {
        /// The last message in the protector's log.
        message: String,
    },
    /// The guest runs without a protector.
    #[error("its guest runs, but its protector cannot be started")]
    Protector(#[source] io::Error),
}

impl From<HandoverError> for StartError {
    fn from(e: HandoverError) -> Self {
        match e {
            HandoverError::Life(e) => Self::Life(e),
            e => Self::Boot(e),
        }
    }
}

impl StartError {
    /// Returns whether the store may become available later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Store(e) => e.may_pass(),
            Self::NotAStore { .. } => true,
            _ => false,
        }
    }
}

/// How the guest was started on this node.
#[derive(Debug, Serialize)]
#[serde(tag = "started", rename_all = "kebab-case")]
pub enum StartResult {
    Already,
    Restored(Restored),
    /// libvirt runs the restored domain.
    RestoredIntoLibvirt(RestoredIntoLibvirt),
    Booted {
        why: &'static str,
    },
}
