//! Errors of replacing the QEMU of a guest that Rekindle did not start.

use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_kernel::surroundings::EnvironmentError;
use rekindle_qemu::adopt::AdoptError;
use std::io;

/// Why the QEMU of a guest that Rekindle did not start cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum UnpreparedError {
    #[error("{name} has changed while its replacement was prepared: {what}; try again")]
    Changed { name: String, what: String },
    #[error("{name} has shut down, or its QEMU has ended, before it was handed over")]
    Ended { name: String },
    #[error(
        "{name}: the previous QEMU (process {source_pid}) runs the guest again, although the guest was handed over to \
         another QEMU (process {destination_pid}); both were left as they are. Only one of them may continue: end the \
         other with kill -KILL, then: rekindle recover {name}"
    )]
    SourceRuns { name: String, source_pid: u32, destination_pid: u32 },
    #[error(
        "the QEMU of {name} died while its guest was handed over, so the guest's memory is lost; start the guest as usual"
    )]
    Lost { name: String },
    #[error(
        "the guest of {name} runs in its new QEMU, but not all of its RAM was moved there, and it waits where it needs a page \
         that is missing: rekindle recover {name}"
    )]
    NotMoved {
        name: String,
        #[source]
        source: RamTransferError,
    },
    #[error(
        "the previous QEMU of {name} ended before all of the guest's RAM was moved to the new one, so the guest's memory is \
         lost; to end what is left of it: rekindle recover {name}"
    )]
    LostInMove { name: String },
    #[error("{name}: the emulator of its TPM for the new QEMU does not answer: {command}")]
    Tpm {
        name: String,
        /// How it was started: its log is named there.
        command: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(transparent)]
    Copy(#[from] RamTransferError),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
}

impl UnpreparedError {
    /// Returns whether `rekindle recover` must finish the operation.
    pub(crate) fn needs_recovery(&self) -> bool {
        matches!(self, Self::SourceRuns { .. } | Self::NotMoved { .. } | Self::LostInMove { .. })
    }
}
