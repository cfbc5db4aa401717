//! This host's identity for a store on a server, as records in run directories and messages of a move have it.

use rekindle_store::remote::Identity;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The paths of certificate, key and authority. In JSON they are an array, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IdentityPaths(PathBuf, PathBuf, PathBuf);

impl IdentityPaths {
    pub(crate) fn of(identity: &Identity) -> Self {
        let Identity { cert, key, ca } = identity.clone();
        Self(cert, key, ca)
    }

    /// Makes the paths independent of the working directory.
    pub(crate) fn absolute(identity: &Identity) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Self(absolute(&identity.cert), absolute(&identity.key), absolute(&identity.ca))
    }

    pub(crate) fn identity(&self) -> Identity {
        let Self(cert, key, ca) = self.clone();
        Identity { cert, key, ca }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn paths_are_an_array_in_json() {
        let identity = Identity { cert: "/cert".into(), key: "/key".into(), ca: "/ca".into() };
        let json = serde_json::to_string(&IdentityPaths::of(&identity)).unwrap();
        assert_eq!(json, r#"["/cert","/key","/ca"]"#);
        let Identity { cert, key, ca } = serde_json::from_str::<IdentityPaths>(&json).unwrap().identity();
        assert_eq!([cert, key, ca], [identity.cert, identity.key, identity.ca]);
    }
}
