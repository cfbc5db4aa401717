//! What differs if the guest is a domain of libvirt: it is checked and ended through libvirt on the source host. The
//! destination host restores it into libvirt.

use super::MoveError;
use super::protocol::MovingDomain;
use crate::target::Target;
use rekindle_disk::overlay::directory::epoch_of_file;
use rekindle_kernel::libvirt_client::{Connection, Domain, LibvirtError};
use rekindle_kernel::patience::answer_within;
use rekindle_libvirt::disks;
use rekindle_life::shutdown::pull_the_plug;
use rekindle_qemu::monitor::Monitor;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::overlays::fence_discarded;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long libvirt may take to end a QEMU before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// The domain of a VM on the source host.
#[derive(Debug, Clone)]
pub(super) struct SourceDomain {
    uuid: String,
    connect: Option<String>,
}

impl SourceDomain {
    /// Returns the domain of a VM; `None` if libvirt does not run the VM.
    pub(super) fn of(state: &State) -> Option<Self> {
        match state.vmm.as_ref()?.monitor.clone()? {
            Monitor::Libvirt { domain, connect } => Some(Self { uuid: domain, connect }),
            Monitor::Socket { .. } => None,
        }
    }

    /// Returns the domain of a VM that can be moved; `None` for a VM of Rekindle's own.
    pub(super) fn movable(held: &LockedVm) -> Result<Option<Self>, MoveError> {
        let name = || held.rundir.name().to_owned();
        if held.state.attached.is_none() {
            return Ok(None);
        }
        let Some(domain) = Self::of(&held.state) else { return Err(MoveError::BareQemu { name: name() }) };
        let foreign = held.state.hardware.foreign.as_ref();
        match foreign.and_then(|foreign| foreign.domain_xml.as_ref()) {
            Some(_) => Ok(Some(domain)),
            None => Err(MoveError::OldAttachment { name: name() }),
        }
    }

    /// Returns what the destination host must know. `connect`: libvirt's connection URI there, if it differs.
    pub(super) fn announce(&self, target: &Target, connect: Option<&String>) -> Result<MovingDomain, MoveError> {
        let failed = |why: String| MoveError::Domain { name: target.name().into(), why };
        let xml = self.find().and_then(|domain| domain.xml(false)).map_err(|e| failed(e.to_string()))?;
        let files = disks::of_domain(&xml).map_err(failed)?.into_iter().flat_map(|disk| disk.files);
        // An overlay may be merged at any time.
        let is_image =
            |file: &PathBuf| file.file_name().is_some_and(|name| epoch_of_file(&name.to_string_lossy()).is_none());
        let images = files.map(PathBuf::from).filter(is_image).collect();
        Ok(MovingDomain { connect: connect.or(self.connect.as_ref()).cloned(), images })
    }

    /// Ends the guest on this host, because the destination host has it. libvirt keeps its definition.
    pub(super) fn end(&self, rundir: &RunDir, state: &State) -> Result<(), MoveError> {
        let domain = self.clone();
        let xml = answer_within(END_TIMEOUT, move || domain.find()?.xml(false));
        if state.vmm.as_ref().is_some_and(|vmm| vmm.is_alive()) {
            let domain = self.clone();
            let ended = answer_within(END_TIMEOUT, move || domain.find()?.destroy());
            let why = match ended {
                Some(Ok(())) => None,
                Some(Err(e)) => Some(e.to_string()),
                None => Some(format!("it has not answered within {} s", END_TIMEOUT.as_secs())),
            };
            if let Some(why) = why {
                tracing::warn!("{}: libvirt does not end the domain, so its QEMU is killed: {why}", rundir.name());
            }
        }
        pull_the_plug(rundir)?;
        // The definition names these overlays. The destination host discards them as well, when it resumes the guest.
        let disks = xml.and_then(Result::ok).and_then(|xml| disks::of_domain(&xml).ok()).unwrap_or_default();
        for file in disks.into_iter().filter_map(|disk| disk.files.into_iter().next()) {
            if let Err(e) = fence_discarded(Path::new(&file)) {
                tracing::warn!(error = &e as &dyn std::error::Error, "libvirt could start {} on it", rundir.name());
            }
        }
        Ok(())
    }

    fn find(&self) -> Result<Domain, LibvirtError> {
        Arc::new(Connection::open(self.connect.as_deref())?).lookup(&self.uuid)
    }
}
