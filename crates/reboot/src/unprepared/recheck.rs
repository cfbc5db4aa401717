//! Checks that a guest is still as it was found, and that the destination QEMU has the same machine.
//!
//! Minutes may pass between the preflight and the pause, in which the guest's manager can change it: a snapshot gives a
//! disk another image, and what the guest writes to it from then on is not in the image that the destination has opened.
//! So the guest is inspected again when nothing but Rekindle can use its monitor any more. The guest runs meanwhile.

use super::{UnpreparedError, preflight_error};
use crate::error::RebootError;
use crate::vmm::QemuInfo;
use rekindle_qemu::adopt::Adopted;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::takeover_command::{
    CommandLine, Destination, Inventory, Item, PluggedDevice, SourceDescriptor, open_descriptors, read_facts, rewrite,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// What the preflight has found, and from which the destination was started.
pub(crate) struct Baseline {
    pub name: String,
    pub adopted: Adopted,
    /// Read before everything else, so that no change is missed.
    pub inventory: Inventory,
    pub open: BTreeMap<RawFd, SourceDescriptor>,
    pub destination: Destination,
    pub line: CommandLine,
    /// Devices that were plugged in since the start of the source.
    pub plugged: Vec<PluggedDevice>,
}

impl Baseline {
    /// Returns the source as reports show it.
    pub(crate) fn source_info(&self) -> QemuInfo {
        let Adopted { binary, version, pid, .. } = &self.adopted;
        QemuInfo { binary: binary.clone(), version: Some(version.clone()), pid: *pid }
    }

    /// Rejects a destination that does not have the machine of the source, and gives it the source's settings.
    pub(crate) fn fit(&self, destination: &mut Qmp) -> Result<(), RebootError> {
        let mut differences = self.inventory.differences_from(&Inventory::read(destination)?);
        for device in &self.plugged {
            differences.extend(device.differences(destination)?);
        }
        if !differences.is_empty() {
            let problem = |item: Item| {
                format!(
                    "{item}: it differs in the new QEMU, because it was changed since the guest's start: shut the guest down \
                     and start it again"
                )
            };
            return Err(preflight_error(&self.name, differences.into_iter().map(problem).collect()));
        }
        self.inventory.apply_settings(destination)?;
        Ok(())
    }

    /// Rejects a source that is not the guest's QEMU any more, or that would need another destination.
    ///
    /// *Needs:* `source` is connected to QEMU itself, and no other program can use that monitor.
    pub(crate) fn check_unchanged(&self, source: &mut Qmp) -> Result<(), RebootError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(rename = "UUID")]
            uuid: String,
        }
        let Answer { uuid } = source.execute("query-uuid", ())?;
        if uuid != self.adopted.uuid {
            return Err(self.changed("another QEMU answers at its monitor"));
        }
        match guest::run_state(source)?.as_str() {
            "running" => {}
            "shutdown" => return Err(UnpreparedError::Ended { name: self.name.clone() }.into()),
            _ => return Err(self.changed("its guest was stopped")),
        }
        let changes = Inventory::read(source)?.changes_since(&self.inventory);
        if !changes.is_empty() {
            let names: Vec<String> = changes.iter().map(Item::to_string).collect();
            return Err(self.changed(&names.join(", ")));
        }
        self.check_command_line(source)
    }

    /// Derives the destination's command line once more. A change that this finds and the inventory does not show is
    /// one of the descriptors, or of a fact that only the rewrite uses.
    fn check_command_line(&self, source: &mut Qmp) -> Result<(), RebootError> {
        let process = self.adopted.process();
        let directory = PathBuf::from(format!("/proc/{}/fd", process.pid));
        let open = open_descriptors(process).map_err(RebootError::file(&directory))?;
        if lasting(&open) != lasting(&self.open) {
            return Err(self.changed("it has other listening sockets or network devices"));
        }
        let facts = read_facts(&self.adopted, source)?;
        // Numbers of new descriptors depend on all that were open, also on those of clients that come and go.
        match rewrite(&self.adopted.arguments, &facts, &self.open, &self.destination) {
            Ok(line) if line == self.line => Ok(()),
            Ok(_) => Err(self.changed("another QEMU would need another command line")),
            Err(obstacles) => {
                let texts: Vec<String> =
                    obstacles.iter().map(|obstacle| format!("{}: {}", obstacle.what, obstacle.why)).collect();
                Err(self.changed(&texts.join("; ")))
            }
        }
    }

    pub(crate) fn changed(&self, what: &str) -> RebootError {
        UnpreparedError::Changed { name: self.name.clone(), what: what.into() }.into()
    }
}

/// Returns the descriptors that the destination gets a counterpart of.
fn lasting(open: &BTreeMap<RawFd, SourceDescriptor>) -> BTreeMap<RawFd, &SourceDescriptor> {
    let is_lasting = |descriptor: &SourceDescriptor| match descriptor {
        SourceDescriptor::Listener(_) | SourceDescriptor::Tap { .. } | SourceDescriptor::VhostNet => true,
        SourceDescriptor::Client { .. } | SourceDescriptor::Null | SourceDescriptor::Other => false,
    };
    open.iter().filter(|(_, descriptor)| is_lasting(descriptor)).map(|(number, open)| (*number, open)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_qemu::takeover_command::ListenAddress;

    #[test]
    fn connections_that_come_and_go_are_no_change() {
        let listener = SourceDescriptor::Listener(ListenAddress::Unix("/run/a".into()));
        let before = BTreeMap::from([(3, listener.clone()), (4, SourceDescriptor::Client { server: "/s".into() })]);
        let now = BTreeMap::from([(3, listener.clone()), (9, SourceDescriptor::Other)]);
        assert_eq!(lasting(&before), lasting(&now));
        assert_ne!(lasting(&before), lasting(&BTreeMap::from([(5, listener)])));
    }
}
