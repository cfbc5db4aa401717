//! A VM's parameters in the cluster manager, identical on each of its nodes.

use rekindle_protect::protector::{DiskPolicy, ProtectSettings};
use rekindle_vm::definition::Name;
use std::ffi::OsString;
use std::path::PathBuf;

#[derive(Debug, Clone)]
pub struct Resource {
    pub name: Name,
    /// Path of the definition. Used when the VM is booted; a restored VM is rebuilt as it was at the checkpoint.
    pub definition: PathBuf,
    pub protect: ProtectSettings,
}

impl Resource {
    /// Returns the arguments for `rekindle protect`, which takes the checkpoints. With `last`, the arguments for taking
    /// the last checkpoint, after which the guest stays stopped.
    #[must_use]
    pub fn protect_arguments(&self, last: bool) -> Vec<OsString> {
        let ProtectSettings { store, identity, every, policy, keep, max_lag, disks, output_commit, .. } = &self.protect;
        let mut all: Vec<OsString> = ["--json", "protect", self.name.as_str(), "--store"].map(OsString::from).into();
        all.push(store.to_string().into());
        let ms = |span: &std::time::Duration| format!("{}ms", span.as_millis());
        let mut add = |flag: &str, value: OsString| all.extend([flag.into(), value]);
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
        if *output_commit {
            all.push("--output-commit".into());
        }
        let mut add = |flag: &str, value: OsString| all.extend([flag.into(), value]);
        match disks {
            DiskPolicy::Refuse => {}
            DiskPolicy::CrashConsistent => add("--disk", "crash-consistent".into()),
            DiskPolicy::Hook(command) => add("--disk-hook", command.into()),
        }
        if last {
            // Takes one checkpoint while the guest runs, so that less remains for the pause.
            all.extend(["--count", "1", "--stay"].map(OsString::from));
        }
        all
    }
}
