//! A VM's parameters in the cluster manager, identical on each of its nodes.

use rekindle_protect::protector::{DiskPolicy, ProtectSettings};
use rekindle_vm::definition::Name;
use std::ffi::OsString;
use std::path::PathBuf;

/// A VM as the cluster manager knows it.
#[derive(Debug, Clone)]
pub struct Resource {
    pub name: Name,
    /// Path of the definition. Used when the VM is booted; a restored VM is rebuilt as it was at the checkpoint.
    pub definition: PathBuf,
    pub protect: ProtectSettings,
}

impl Resource {
    /// Returns the arguments for `rekindle protect`, which takes the checkpoints. With `takes_last_checkpoint`, the
    /// arguments for taking the last checkpoint, after which the guest stays stopped.
    #[must_use]
    pub fn protect_arguments(&self, takes_last_checkpoint: bool) -> Vec<OsString> {
        let ProtectSettings { store, identity, every, policy, keep, max_lag, disks, output_commit, .. } = &self.protect;
        let mut arguments: Vec<OsString> = ["--json", "protect", self.name.as_str()].map(OsString::from).into();
        let ms = |duration: &std::time::Duration| format!("{}ms", duration.as_millis());
        let mut add = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
        add("--store", store.to_string().into());
        add("--every", ms(every).into());
        add("--keep", keep.to_string().into());
        if let Some(policy) = policy {
            add("--policy", policy.to_string().into());
        }
        if let Some(lag) = max_lag {
            add("--max-lag", ms(lag).into());
        }
        if let Some(identity) = identity {
            add("--cert", identity.cert.clone().into());
            add("--key", identity.key.clone().into());
            add("--ca", identity.ca.clone().into());
        }
        match disks {
            DiskPolicy::Refuse => {}
            DiskPolicy::CrashConsistent => add("--disk", "crash-consistent".into()),
            DiskPolicy::Overlays { .. } => add("--disk", "overlays".into()),
            DiskPolicy::Hook(command) => add("--disk-hook", command.into()),
        }
        if *output_commit {
            arguments.push("--output-commit".into());
        }
        if takes_last_checkpoint {
            // Takes one checkpoint while the guest runs, so that less remains for the pause.
            arguments.extend(["--count", "1", "--stay"].map(OsString::from));
        }
        arguments
    }
}
