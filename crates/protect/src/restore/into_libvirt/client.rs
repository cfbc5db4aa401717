//! What a restore asks libvirt.

use crate::restore::RestoreError;
use rekindle_kernel::libvirt_client::{Connection, Domain, DomainState, LibvirtError};
use rekindle_libvirt::disks::{self, DomainDisk};
use rekindle_libvirt::portable_xml::{self, Description, DiskFile};
use rekindle_vm::network::has_interface;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A connection to libvirt, for one domain.
pub(super) struct Libvirt {
    pub(super) connection: Arc<Connection>,
    /// Names the domain in errors.
    pub(super) domain: String,
}

impl Libvirt {
    pub(super) fn open(uri: Option<String>, domain: String) -> Result<Self, RestoreError> {
        match Connection::open(uri.as_deref()) {
            Ok(connection) => Ok(Self { connection: Arc::new(connection), domain }),
            Err(source) => Err(RestoreError::Libvirt { domain, source }),
        }
    }

    pub(super) fn failed(&self, source: LibvirtError) -> RestoreError {
        RestoreError::Libvirt { domain: self.domain.clone(), source }
    }

    /// Finds the domain. `None`: libvirt does not know it.
    pub(super) fn find(&self, uuid: &str) -> Result<Option<Domain>, RestoreError> {
        self.connection.find(uuid).map_err(|e| self.failed(e))
    }

    /// Returns the XML with which this host defines the domain.
    pub(super) fn definition_of(&self, uuid: &str) -> Option<String> {
        self.find(uuid).ok().flatten()?.definition().ok()
    }

    pub(super) fn domain(&self, uuid: &str) -> Result<Domain, RestoreError> {
        self.connection.lookup(uuid).map_err(|e| self.failed(e))
    }

    /// Defines the running domain, or puts its definition on the disks that it has now. Can be repeated.
    pub(super) fn define(&self, uuid: &str) -> Result<(), RestoreError> {
        let domain = self.domain(uuid)?;
        let running = domain.portable_xml().map_err(|e| self.failed(e))?;
        let unusable = |problem: String| RestoreError::DomainXml { problem };
        let definition = match domain.is_persistent().map_err(|e| self.failed(e))? {
            false => running,
            true => {
                let definition = domain.definition().map_err(|e| self.failed(e))?;
                let defined = disks::of_domain(&definition).map_err(unusable)?;
                let mut files = BTreeMap::new();
                for disk in disks::of_domain(&running).map_err(unusable)? {
                    let has_other_file = |other: &&DomainDisk| other.target == disk.target && other.files != disk.files;
                    // Each disk that the restore has put on another file is on an overlay, not on a block device.
                    let file = disk.files.first().map(PathBuf::from).filter(|file| file.is_file());
                    if let (Some(_), Some(file)) = (defined.iter().find(has_other_file), file) {
                        files.insert(disk.target, DiskFile::qcow2(file));
                    }
                }
                portable_xml::with_disks_on(&definition, &files).map_err(unusable)?
            }
        };
        self.connection.define(&definition).map_err(|e| self.failed(e))
    }

    /// Returns whether libvirt has a guest of the domain.
    pub(super) fn has_guest(&self, uuid: &str) -> Result<bool, RestoreError> {
        let Some(known) = self.find(uuid)? else { return Ok(false) };
        Ok(known.state().map_err(|e| self.failed(e))? != DomainState::ShutOff)
    }

    /// Returns what the domain needs besides its disks and this host does not have.
    pub(super) fn missing(&self, description: &Description) -> Result<Vec<String>, RestoreError> {
        let mut missing = Vec::new();
        for network in &description.networks {
            if !self.connection.has_active_network(network).map_err(|e| self.failed(e))? {
                missing.push(format!("an active network {network}: virsh net-start {network}"));
            }
        }
        let absent = description.interfaces.iter().filter(|interface| !has_interface(interface));
        missing.extend(absent.map(|interface| format!("a network interface {interface}")));
        missing.extend(missing_files(description.files.iter().map(PathBuf::as_path)));
        Ok(missing)
    }
}

/// Returns the missing files of a list, for an error.
pub(super) fn missing_files<'a>(files: impl Iterator<Item = &'a Path>) -> impl Iterator<Item = String> {
    files.filter(|file| !file.exists()).map(|file| format!("the file {}", file.display()))
}
