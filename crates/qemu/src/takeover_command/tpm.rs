//! The TPM of the guest. Its state is in an *emulator*, the process `swtpm`, to which QEMU is connected. QEMU saves that state
//! with those of its devices, and gives it to the emulator that it is connected to when it loads them. An emulator serves one QEMU, so the
//! destination is connected to another one.

use super::character_devices::ADDRESS_KEYS;
use super::{Descriptor, Rewriter, SourceDescriptor};
use crate::foreign::CommandOption;
use crate::options::Options;
use std::collections::BTreeSet;
use std::os::fd::RawFd;

/// The type of a TPM whose state is in an emulator.
const EMULATOR: &str = "emulator";

/// Returns the ids of the character devices that are connections to emulators.
pub(super) fn connections(options: &[CommandOption<'_>]) -> BTreeSet<String> {
    let devices = options.iter().filter(|option| option.name == "tpmdev");
    let devices = devices.filter_map(|option| Options::parse(option.value?, "type").ok());
    let emulated = devices.filter(|device| device.get("type").as_deref() == Some(EMULATOR));
    emulated.filter_map(|device| device.get("chardev")).collect()
}

impl Rewriter<'_> {
    pub(super) fn read_tpmdev(&mut self, option: &CommandOption<'_>) {
        let Some(device) = self.parse(option, "type") else { return };
        match device.get("type").as_deref() {
            Some(EMULATOR) => self.keep_unchanged(option),
            kind => {
                let why = "its state is in hardware of the host, which serves one QEMU: start it without";
                self.refuse(format!("-tpmdev {}", kind.unwrap_or_default()), why);
            }
        }
    }

    /// Makes a connection to an emulator one that the destination inherits. Returns whether the options were changed; `None`
    /// after an obstacle was added.
    pub(super) fn pass_tpm_connection(&mut self, what: &str, socket: &mut Options) -> Option<bool> {
        let named: Option<RawFd> = socket.get("fd").and_then(|number| number.parse().ok());
        let server = match named.and_then(|number| self.numbers.source(number)) {
            Some(SourceDescriptor::Client { server }) => Some(server.clone()),
            _ => socket.get("path").filter(|_| named.is_none()),
        };
        let Some(server) = server.filter(|_| socket.get("backend").as_deref() == Some("socket")) else {
            self.refuse(what, "it is no connection to the Unix socket of a TPM's emulator");
            return None;
        };
        if let Some(number) = named {
            self.numbers.put(number, Descriptor::TpmEmulator { server });
            return Some(false);
        }
        let number = self.numbers.put_new(Descriptor::TpmEmulator { server });
        socket.remove(|key| ADDRESS_KEYS.contains(&key) || key.starts_with("reconnect"));
        socket.set("fd", &number.to_string());
        Some(true)
    }
}
