//! A VM's parameters in the cluster manager, identical on each of its nodes.

use rekindle_protect::known_store::KnownStoreFile;
use rekindle_protect::protector::{DiskPolicy, ProtectSettings};
use rekindle_protect::restore::Request;
use rekindle_store::keys::KeySource;
use rekindle_store::types::KnownState;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::host::Host;
use std::ffi::OsString;
use std::path::PathBuf;

/// The libvirt whose domains can be resources.
pub const SYSTEM_URI: &str = "qemu:///system";

/// A VM as the cluster manager knows it.
#[derive(Debug, Clone)]
pub struct Resource {
    pub name: Name,
    pub guest: GuestKind,
    pub protect: ProtectSettings,
}

/// What runs as the resource.
#[derive(Debug, Clone)]
pub enum GuestKind {
    /// A VM that Rekindle starts.
    Own {
        /// Path of the definition. Used when the VM is booted; a restored VM is rebuilt as it was at the checkpoint.
        definition: PathBuf,
    },
    /// A domain of the system's libvirt (`qemu:///system`), which is attached while it runs.
    Domain {
        /// libvirt's name of it.
        name: String,
    },
}

impl Resource {
    /// Returns the request for a restore of the newest checkpoint.
    pub(crate) fn restore_request(&self, host: &Host) -> Request {
        let (store, credentials) = (self.protect.store.clone(), self.protect.credentials.clone());
        let hold_output = self.protect.output_commit;
        let (local_definition, local_domain) = match &self.guest {
            // Without it, only what `host.toml` allows can be restored.
            GuestKind::Own { definition } => {
                let definition = Definition::load(definition)
                    .inspect_err(|e| tracing::warn!("the checkpoint may not use what the definition names: {e}"));
                (definition.ok(), None)
            }
            GuestKind::Domain { name } => (None, Some(name.clone())),
        };
        Request {
            store,
            credentials,
            at: None,
            at_least: KnownState::default(),
            known_store: KnownStoreFile::of(host, self.name.as_str()),
            is_store_of_source: false,
            eager: false,
            definition: None,
            local_definition,
            local_domain,
            qemu: None,
            hold_output,
            move_claim: None,
        }
    }

    /// Returns the arguments for `rekindle protect`, which takes the checkpoints. With `takes_last_checkpoint`, the
    /// arguments for taking the last checkpoint, after which the guest stays stopped.
    #[must_use]
    pub fn protect_arguments(&self, takes_last_checkpoint: bool) -> Vec<OsString> {
        let ProtectSettings { store, credentials, every, policy, keep, max_lag, disks, output_commit, .. } =
            &self.protect;
        let mut arguments: Vec<OsString> = ["--json", "protect", self.name.as_str()].map(OsString::from).into();
        let ms = |duration: &std::time::Duration| format!("{}ms", duration.as_millis());
        // All options are those of the resource.
        arguments.push("--no-settings".into());
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
        match credentials.as_ref().and_then(|credentials| credentials.keys.as_ref()) {
            Some(KeySource::File(path)) => add("--key-file", path.clone().into()),
            Some(KeySource::Command(command)) => add("--key-command", command.into()),
            None => {}
        }
        if let Some(file) = credentials.as_ref().and_then(|credentials| credentials.environment_file.as_ref()) {
            add("--environment-file", file.path().into());
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
