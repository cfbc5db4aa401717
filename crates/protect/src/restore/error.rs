//! Why a guest was not restored.

use crate::fill::FillError;
use crate::known_store::KnownStoreError;
use crate::owned::OwnError;
use crate::recipe::RecipeError;
use crate::save_image::SaveImageError;
use crate::target::TargetError;
use rekindle_handover::HandoverError;
use rekindle_kernel::inject::InjectError;
use rekindle_kernel::libvirt_client::LibvirtError;
use rekindle_life::attach::AttachError;
use rekindle_memory::missing::PagerError;
use rekindle_memory::ram::GuestRamError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::stream::StreamError;
use rekindle_qemu::transfer::TransferError;
use rekindle_qemu::vmm::VmmError;
use rekindle_store::StoreError;
use rekindle_vm::error::LifeError;
use rekindle_vm::overlays::OverlayDisksError;
use std::io;
use std::path::PathBuf;

/// Why a guest was not restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What this host knows of the VM's store cannot be read, or requires a key.
    #[error(transparent)]
    KnownStore(#[from] KnownStoreError),
    /// The store's owner epoch cannot be recorded.
    #[error(transparent)]
    RunDir(TargetError),
    /// The guest was resumed, and a later step failed.
    #[error(
        "{name}: its guest was resumed in QEMU (process {pid}), which runs, but the restore failed after that; nothing \
         was undone: rekindle recover {name}"
    )]
    MayRun {
        name: String,
        pid: u32,
        /// The step that failed.
        #[source]
        source: Box<RestoreError>,
    },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A checkpoint with another machine or other disks was committed meanwhile.
    #[error(
        "checkpoint {number} of {name}, which was just committed, has another machine or other disks than the one \
         before it; try again"
    )]
    Changed { name: String, number: u64 },
    /// A newer checkpoint was committed during the load.
    #[error("checkpoint {newest} of {name} was committed while the one before it was being loaded; try again")]
    Newer { name: String, newest: u64 },
    /// The store has shown a newer state before.
    #[error(
        "{store} must have checkpoint {newest} of {name}, and now shows another state, with {number} as the newest: its storage does \
         not keep what was written; nothing was restored. Repair the storage, then try again"
    )]
    WentBack { name: String, store: String, newest: u64, number: u64 },
    /// A checkpoint that was being loaded was not committed.
    #[error("checkpoint {number} was not committed by the source host")]
    NotCommitted { number: u64 },
    /// The committed checkpoint differs from the announced one.
    #[error("checkpoint {number} differs from what the source host sent before it was committed: {what}")]
    DiffersFromAnnounced {
        number: u64,
        /// The differing part, as a noun phrase.
        what: String,
    },
    /// The VM cannot run on this host.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The disks of the checkpoint are missing, newer, or in use.
    #[error(transparent)]
    Overlays(#[from] OverlayDisksError),
    /// A waiting QEMU opens its disks too early.
    #[error(
        "the disks of checkpoint {number} are on overlays, which a waiting QEMU cannot have; restore it without --prepare"
    )]
    PrepareOverlays { number: u64 },
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("QEMU could not load checkpoint {number} of {name}; it printed:\n{log}")]
    Load {
        name: String,
        number: u64,
        /// The end of QEMU's log.
        log: String,
        #[source]
        source: TransferError,
    },
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device state is malformed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error("QEMU has other RAM blocks than the guest of checkpoint {number}: {what}")]
    Blocks { number: u64, what: String },
    #[error(
        "the guest of checkpoint {number} would see other processors here: {}; restore with a --qemu, or on a host, \
         like those that it ran on", listed(.words)
    )]
    Cpu {
        number: u64,
        /// Name of each feature word, its value on the checkpoint's host, and its value on this host.
        words: Vec<(String, u64, u64)>,
    },
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// `fill.json` cannot be written.
    #[error(transparent)]
    Fill(#[from] FillError),
    #[error("cannot start the pager of {name}")]
    Start {
        name: String,
        #[source]
        source: io::Error,
    },
    /// An eager restore was not completed.
    #[error("not all memory of {name} was loaded; its pager printed:\n{log}")]
    NotFilled {
        name: String,
        /// The end of the pager's log.
        log: String,
    },
    /// QEMU died immediately after the resume.
    #[error(
        "the QEMU of {name} died just after it had resumed the guest; the checkpoint is unchanged, and can be restored \
         again; end of the QEMU's log:\n{log}"
    )]
    DiedResumed { name: String, log: String },
    /// A step of the hand-over failed.
    #[error(transparent)]
    Handover(HandoverError),
    /// The checkpoint is not of a libvirt domain.
    #[error(transparent)]
    SaveImage(#[from] SaveImageError),
    /// libvirt's message.
    #[error("libvirt cannot restore domain {domain}")]
    Libvirt {
        domain: String,
        #[source]
        source: LibvirtError,
    },
    #[error("libvirt runs domain {domain} already; to restore it, end it first: virsh destroy {domain}")]
    DomainRuns { domain: String },
    /// Parts of the domain that this host does not have, as noun phrases.
    #[error("this host does not have what domain {domain} needs:\n{}", missing.iter().map(|what| format!("  - {what}")).collect::<Vec<_>>().join("\n"))]
    Missing { domain: String, missing: Vec<String> },
    #[error("libvirt's description of the domain cannot be used: {problem}")]
    DomainXml { problem: String },
    /// The restored QEMU cannot be protected.
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("{}", path.display())]
    Journal {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<OwnError> for RestoreError {
    fn from(e: OwnError) -> Self {
        match e {
            OwnError::Store(e) => Self::Store(e),
            OwnError::KnownStore(e) => Self::KnownStore(e),
            OwnError::RunDir(e) => Self::RunDir(e),
        }
    }
}

impl RestoreError {
    /// Returns whether a recovery that failed for this reason must be repeated.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        match self {
            Self::MayRun { .. } => true,
            Self::Handover(e) => e.needs_recovery(),
            Self::Qmp(e) => e.is_silence(),
            Self::Vmm(e) => e.is_silence(),
            Self::Life(e) => e.is_silence(),
            _ => false,
        }
    }
}

impl From<HandoverError> for RestoreError {
    fn from(e: HandoverError) -> Self {
        match e {
            HandoverError::Life(e) => Self::Life(e),
            HandoverError::Vmm(e) => Self::Vmm(e),
            HandoverError::Qmp(e) => Self::Qmp(e),
            HandoverError::Transfer(e) => Self::Transfer(e),
            HandoverError::File { path, source } => Self::Journal { path, source },
            HandoverError::DiedRunning { name, log } => Self::DiedResumed { name, log },
            e => Self::Handover(e),
        }
    }
}

pub(super) fn listed(words: &[(String, u64, u64)]) -> String {
    let difference = |(name, was, now): &(String, u64, u64)| format!("{name} was {was:#x} and is {now:#x}");
    words.iter().map(difference).collect::<Vec<_>>().join(", ")
}
