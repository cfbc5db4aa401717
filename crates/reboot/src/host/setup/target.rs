//! The host that `rekindle host init` sets up. In tests it is a directory, in place of the root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Path by which the units call this program.
pub(super) const INSTALLED_PROGRAM: &str = "/usr/bin/rekindle";

/// The host that is set up: the root of its files, and the path of this program.
#[derive(Debug, Clone)]
pub struct SetupTarget {
    /// `/`, except in tests.
    pub root: PathBuf,
    pub program: PathBuf,
}

impl SetupTarget {
    /// Returns this host, with this program.
    ///
    /// # Errors
    /// Errors of finding the path of this program.
    pub fn this_host() -> io::Result<Self> {
        let running = std::env::current_exe()?;
        let installed = Path::new(INSTALLED_PROGRAM);
        let is_installed = fs::canonicalize(installed).is_ok_and(|installed| installed == running);
        Ok(Self { root: "/".into(), program: if is_installed { installed.into() } else { running } })
    }

    /// Returns the path of a file of the host, whose own path is `absolute`.
    pub(super) fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// Returns whether one of `directories` has this file.
    pub(super) fn has_file(&self, directories: &[&str], name: &str) -> bool {
        directories.iter().any(|directory| self.path(directory).join(name).exists())
    }
}
