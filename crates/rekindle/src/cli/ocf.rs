//! Arguments of `rekindle ocf`, which the resource agent `ocf:rekindle:vm` calls.

use super::moving::RemoteHost;
use super::protect::{CheckpointOptions, DiskRule};
use clap::{Args, Subcommand, ValueEnum};
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub enum Ocf {
    /// Start the VM on this node, from its newest checkpoint.
    ///
    /// The guest is booted if there is no checkpoint, or if it shut down cleanly after the newest one.
    ///
    /// Needs: no other host that runs the guest (fencing ensures that); the store, created by `rekindle store init`;
    /// room for its RAM.
    ///
    /// On success: the guest runs and checkpoints are taken; the previous owner can commit no more checkpoints.
    ///
    /// On failure: nothing of the VM runs here; the checkpoint is unchanged.
    #[command(after_help = "\
Example:
  rekindle ocf start web --store s3://checkpoints/web")]
    Start(OcfResource),
    /// Take a last checkpoint of the VM and stop it on this node.
    ///
    /// Needs: nothing.
    ///
    /// On success: nothing of the VM runs here.
    ///
    /// On failure: a process could not be ended; this host must be fenced.
    #[command(after_help = "\
Example:
  rekindle ocf stop web --store s3://checkpoints/web")]
    Stop(OcfStop),
    /// Move the running guest to another node (OCF action migrate_to).
    ///
    /// The guest is stopped only for a last checkpoint. `rekindle ocf monitor` on the other node shows whether it runs
    /// there.
    ///
    /// Needs: as for `rekindle move`: the store and the disk images on both nodes, and a command that connects to the
    /// other node.
    ///
    /// On success: the guest runs there; nothing of it is left here.
    ///
    /// On failure: the guest continues here and checkpoints are taken; or the error names what must be repaired, which
    /// a stop here does.
    #[command(after_help = "\
Example:
  rekindle ocf migrate-to web --to node2 --store s3://checkpoints/web")]
    MigrateTo(OcfMigrate),
    /// Check whether the guest runs on this node.
    ///
    /// Exit status: 0 it runs; 190 it runs and is degraded; 7 it does not run; 1 it has failed.
    ///
    /// Needs: nothing.
    ///
    /// On success: a running guest has a protector; a guest that now belongs to another host was ended here.
    ///
    /// On failure: nothing was changed.
    #[command(after_help = "\
Example:
  rekindle ocf monitor web --store s3://checkpoints/web")]
    Monitor(OcfMonitor),
    /// Print the VM's resource as commands for crm and pcs.
    ///
    /// The resource includes the processors and memory that the VM needs.
    ///
    /// Needs: the definition.
    ///
    /// On success: nothing is changed; the lines can be pasted.
    ///
    /// On failure: the error names what is wrong with the definition.
    #[command(after_help = "\
Example:
  rekindle ocf show-config web --store s3://checkpoints/web")]
    ShowConfig(OcfResource),
}

/// A VM as a resource, the same on each node.
#[derive(Debug, Args)]
pub struct OcfResource {
    /// The VM.
    pub name: Name,
    /// Its definition [default: /etc/rekindle/NAME.toml].
    #[arg(long, value_name = "FILE", conflicts_with = "libvirt")]
    pub definition: Option<PathBuf>,
    /// The domain of libvirt (qemu:///system) that is the resource, instead of a VM with a definition.
    #[arg(long, value_name = "DOMAIN", value_parser = domain_name, conflicts_with = "output_commit")]
    pub libvirt: Option<String>,
    #[command(flatten)]
    pub checkpoints: CheckpointOptions,
    /// How to treat disks that Rekindle does not serve [default: overlays for a domain, otherwise such a VM is rejected].
    #[arg(long, value_enum, value_name = "RULE")]
    pub disk: Option<DiskRule>,
    /// The deadline for this command.
    #[arg(long, default_value = "20s", value_name = "TIME")]
    pub within: Span,
}

/// Parses the name of a domain. libvirt has files with this name, and would take digits for an ID.
fn domain_name(text: &str) -> Result<String, String> {
    let is_uuid = text.len() == 36 && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit());
    if text.is_empty() || text.contains('/') || text.chars().all(|c| c.is_ascii_digit()) || is_uuid {
        return Err(
            "not a domain's name; give the name that `virsh list --all --name` prints, not a number or a UUID".into()
        );
    }
    Ok(text.to_owned())
}

#[derive(Debug, Args)]
pub struct OcfStop {
    #[command(flatten)]
    pub resource: OcfResource,
    /// How to stop the guest.
    #[arg(long, value_enum, value_name = "HOW", default_value = "suspend")]
    pub how: StopMethod,
    /// Only show what would be stopped; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// How to stop a guest.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum StopMethod {
    /// Take a last checkpoint, then power off: the next start resumes the guest.
    Suspend,
    /// Shut the guest down: the next start boots it.
    Shutdown,
}

#[derive(Debug, Args)]
pub struct OcfMigrate {
    #[command(flatten)]
    pub resource: OcfResource,
    #[command(flatten)]
    pub remote: RemoteHost,
    /// Only check, here and on the other node, whether the VM can be moved; change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct OcfMonitor {
    #[command(flatten)]
    pub resource: OcfResource,
    /// Also check its service, with the `probe` of its definition.
    #[arg(long)]
    pub deep: bool,
}
