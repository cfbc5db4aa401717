//! Checkpoint policies: which pages are copied at what time. The benchmarks compare the policies. If none is
//! configured, the protector chooses the best one for the guest.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// When a checkpoint copies the guest's dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// All dirty pages while the guest is stopped: the paper's baseline (section III-A).
    Basic,
    /// No pages while the guest is stopped. After the guest has resumed, each page is copied before the guest may
    /// change it (section III-B).
    Cow,
    /// Dirty pages while the guest runs, and while it is stopped the pages that it has written in the meantime.
    Precopy,
}

impl Policy {
    pub const ALL: [Self; 3] = [Self::Basic, Self::Cow, Self::Precopy];

    /// Returns the policy's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Cow => "cow",
            Self::Precopy => "precopy",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let policy = Self::ALL.into_iter().find(|policy| policy.name() == text);
        policy.ok_or_else(|| format!("there is no policy `{text}`; use one of: basic, cow, precopy"))
    }
}
