//! Findings of `rekindle doctor` about reboots of the host under its guests.

use super::super::survived::command_line;
use super::check_units;
use super::reserve::{self, Reserve};
use rekindle_vm::doctor::{Finding, Level};
use rekindle_vm::host::Host;
use std::path::Path;

const INIT: &str = "rekindle host init --reserve SIZE --write";

/// Returns all findings. A host that was never set up gets a single finding, of level limited.
#[must_use]
pub fn findings() -> Vec<Finding> {
    let finding = |check: &str, level, observation: String, hint: &str| Finding {
        check: check.into(),
        level,
        observation,
        hint: hint.into(),
    };
    let reserve = command_line().ok().as_deref().and_then(Reserve::of);
    let directory = Host::open().ok().and_then(|host| host.named_ram_directory().map(Path::to_owned));
    let (Some(reserve), Some(directory)) = (reserve, directory.as_ref()) else {
        let found = match (reserve, directory) {
            (None, None) => "not set up: guests' RAM is lost when the host reboots".to_owned(),
            (None, Some(_)) => "`ram_dir` is set, but no RAM is reserved on this kernel's command line".to_owned(),
            (Some(reserve), None) => format!("{reserve} is reserved, but host.toml has no `ram_dir`"),
            (Some(_), Some(_)) => String::new(),
        };
        return vec![finding("host reboot", Level::Limited, found, &format!("for reboot host --how warm: {INIT}"))];
    };
    let device = match reserve::device(Path::new("/sys"), reserve) {
        Ok(Some(device)) => finding("reserved RAM", Level::Good, format!("{reserve}: {}", device.display()), ""),
        Ok(None) => {
            let hint = "modprobe nd_e820 nd_pmem; dmesg | grep pmem";
            finding("reserved RAM", Level::Limited, format!("Linux has created no device for {reserve}"), hint)
        }
        Err(e) => finding("reserved RAM", Level::Limited, e.to_string(), "mount /sys"),
    };
    let mounted = match reserve::holds(directory) {
        Ok(true) => finding("guests' RAM", Level::Good, format!("{}, with DAX", directory.display()), ""),
        Ok(false) => {
            let found = format!("{} is not in the reserved RAM", directory.display());
            finding("guests' RAM", Level::Limited, found, "rekindle host mount")
        }
        Err(e) => {
            finding("guests' RAM", Level::Limited, format!("{}: {e}", directory.display()), "rekindle host mount")
        }
    };
    let units = match check_units() {
        Ok(()) => finding("host units", Level::Good, "guests are suspended and resumed by systemd".into(), ""),
        Err(e) => finding("host units", Level::Limited, e.to_string(), INIT),
    };
    vec![device, mounted, units]
}
