//! The two ways of private RAM to a destination.

use std::fmt;

/// How private RAM gets to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RamTransfer {
    /// Copied while the guest runs in the source, which keeps its RAM until it is ended.
    Copied,
    /// Moved in place, page by page, when the guest runs in the destination. The source loses each page that was moved.
    InPlace,
}

/// As the beginning of "... the guest's RAM needs".
impl fmt::Display for RamTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Copied => "copying",
            Self::InPlace => "moving",
        })
    }
}
