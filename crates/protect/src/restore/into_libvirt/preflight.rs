//! Checks whether this host could run a domain that runs on another host. Changes nothing.

use super::client::{Libvirt, missing_files};
use crate::recipe::Recipe;
use crate::recipe::permission::Permission;
use crate::restore::RestoreError;
use crate::restore::checkpoint::ChosenCheckpoint;
use crate::restore::error::listed;
use rekindle_libvirt::portable_xml;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::cpu;
use rekindle_vm::definition::Name;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware;
use rekindle_vm::host::Host;
use rekindle_vm::overlays::OverlayEpoch;
use rekindle_vm::slot::IdleSlot;
use std::path::{Path, PathBuf};

/// Checks whether libvirt on this host may and could run the domain of a recipe as VM `name`. `images`: the files of its
/// disks, which must be on shared storage. `connect`: libvirt's connection URI.
///
/// # Errors
/// [`RestoreError::Missing`] lists what this host does not have.
pub(crate) fn check_domain(
    host: &Host,
    name: &Name,
    permission: &Permission,
    recipe: Recipe,
    images: &[PathBuf],
    connect: Option<String>,
) -> Result<(), RestoreError> {
    let Some(xml) = recipe.domain_xml() else { return Ok(()) };
    let description = portable_xml::describe(xml).map_err(|problem| RestoreError::DomainXml { problem })?;
    let libvirt = Libvirt::open(connect, description.name.clone())?;
    // The checkpoint that is restored later is checked again, with its overlays.
    let Some(recipe) = permission.allow_domain(recipe, &[], &|uuid| libvirt.definition_of(uuid))? else {
        return Ok(());
    };
    if libvirt.has_guest(&description.uuid)? {
        return Err(RestoreError::DomainRuns { domain: description.name });
    }
    let idle_slot = IdleSlot::lock(host, name.as_str(), "move")?;
    let prepared = idle_slot.prepared().map_or(Ok(()), |(state, _)| state.refuse_prepared());
    idle_slot.release();
    prepared.map_err(LifeError::from)?;
    let mut missing = libvirt.missing(&description)?;
    missing.extend(missing_files(images.iter().map(PathBuf::as_path)));
    if let Some(emulator) = description.emulator.filter(|emulator| emulator.exists()) {
        missing.extend(missing_in_qemu(host, &emulator, &recipe.hardware())?);
    }
    if missing.is_empty() { Ok(()) } else { Err(RestoreError::Missing { domain: description.name, missing }) }
}

/// Checks whether this host has the disks of a checkpoint, which its QEMU still uses.
///
/// # Errors
/// [`RestoreError::Missing`] lists what this host does not have.
pub(crate) fn check_disks(name: &Name, chosen: &ChosenCheckpoint<Recipe>) -> Result<(), RestoreError> {
    let missing: Vec<_> = chosen.overlays.iter().filter_map(OverlayEpoch::missing).collect();
    if missing.is_empty() { Ok(()) } else { Err(RestoreError::Missing { domain: name.to_string(), missing }) }
}

/// Returns what the guest needs and this QEMU does not have on this host.
fn missing_in_qemu(host: &Host, emulator: &Path, hardware: &Hardware) -> Result<Vec<String>, RestoreError> {
    let binary_cache = host.binaries();
    let binary = Binary::probe_cached(emulator, &binary_cache).map_err(LifeError::from)?;
    let binary = hardware::binary_for(hardware, binary, &binary_cache).map_err(LifeError::from)?;
    let mut missing = hardware::missing(hardware, &binary);
    if !missing.is_empty() {
        return Ok(missing);
    }
    if let Some(foreign) = &hardware.foreign {
        let found = binary.cpu_features(&hardware.machine, &hardware.accel, &hardware.cpu).map_err(LifeError::from)?;
        let words = cpu::differences(&foreign.cpu, &found);
        if !words.is_empty() {
            missing.push(format!("processors like those that the guest sees: {}", listed(&words)));
        }
    }
    Ok(missing)
}
