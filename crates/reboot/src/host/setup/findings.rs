//! Findings of `rekindle doctor` about reboots of the host under its guests.

use super::check_units;
use super::reserve::{self, Reserve};
use crate::host::survived::command_line;
use rekindle_vm::doctor::{Finding, Level};
use rekindle_vm::host::Host;
use std::path::Path;

/// Command that sets a host up.
const INIT_COMMAND: &str = "rekindle host init --reserve SIZE --write";

/// Returns all findings. A host that was never set up gets a single finding, of level limited.
#[must_use]
pub fn findings() -> Vec<Finding> {
    let reserve = command_line().ok().as_deref().and_then(Reserve::of);
    let ram_directory = Host::open().ok().and_then(|host| host.named_ram_directory().map(Path::to_owned));
    match (reserve, ram_directory) {
        (Some(reserve), Some(ram_directory)) => {
            vec![examine_device(reserve), examine_ram_directory(&ram_directory), examine_units()]
        }
        (None, None) => vec![not_set_up("not set up: guests' RAM is lost when the host reboots".into())],
        (None, Some(_)) => {
            vec![not_set_up("`ram_dir` is set, but no RAM is reserved on this kernel's command line".into())]
        }
        (Some(reserve), None) => vec![not_set_up(format!("{reserve} is reserved, but host.toml has no `ram_dir`"))],
    }
}

fn good(what: &str, found: String) -> Finding {
    Finding { check: what.into(), level: Level::Good, observation: found, hint: String::new() }
}

fn limited(what: &str, found: String, hint: &str) -> Finding {
    Finding { check: what.into(), level: Level::Limited, observation: found, hint: hint.into() }
}

fn not_set_up(found: String) -> Finding {
    limited("host reboot", found, &format!("for reboot-host --how warm: {INIT_COMMAND}"))
}

fn examine_device(reserve: Reserve) -> Finding {
    let what = "reserved RAM";
    match reserve::find_device(Path::new("/sys"), reserve) {
        Ok(Some(device)) => good(what, format!("{reserve}: {}", device.display())),
        Ok(None) => {
            let hint = "modprobe nd_e820 nd_pmem; dmesg | grep pmem";
            limited(what, format!("Linux has created no device for {reserve}"), hint)
        }
        Err(e) => limited(what, e.to_string(), "mount /sys"),
    }
}

fn examine_ram_directory(directory: &Path) -> Finding {
    let (what, hint) = ("guests' RAM", "rekindle host mount");
    match reserve::holds(directory) {
        Ok(true) => good(what, format!("{}, with DAX", directory.display())),
        Ok(false) => limited(what, format!("{} is not in the reserved RAM", directory.display()), hint),
        Err(e) => limited(what, format!("{}: {e}", directory.display()), hint),
    }
}

fn examine_units() -> Finding {
    let what = "host units";
    match check_units() {
        Ok(()) => good(what, "guests are suspended and resumed by systemd".into()),
        Err(e) => limited(what, e.to_string(), INIT_COMMAND),
    }
}
