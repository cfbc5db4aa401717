//! Commands and flags, declared once: help, completions and man pages come from here. Each group of commands has a
//! file.

mod disk;
mod groups;
mod host;
mod moving;
mod ocf;
mod protect;
mod reboot;
mod settings;
mod store;
mod tools;
mod vm;

pub use disk::{Disk, DiskAt, DiskLimit, DiskMerge, DiskRate, DiskServe};
pub use groups::command;
pub use host::{Host, HostInit, HostSuspend};
pub use moving::{Move, RemoteHost};
pub use ocf::{Ocf, OcfMigrate, OcfMonitor, OcfResource, OcfStop, StopMethod};
pub use protect::{CheckpointOptions, DiskRule, Pager, Protect, Restore};
pub use reboot::{EndOs, OsMethod, Others, PreviousName, Reboot, RebootHost, RebootMethod, RebootOs, RebootVmm};
pub use settings::Settings;
pub use store::{Store, StoreAt, StoreCredentials, StoreExport, StoreImport, StoreNewKey};
pub use tools::{Completions, Doctor, Man, Metrics, Monitor, Probe};
pub use vm::{Attach, Events, NameOnly, Recover, Run, Show, Status, Stop, Validate};

use crate::output::Usage;
use clap::error::{ContextKind, ContextValue};
use clap::{FromArgMatches, Parser, Subcommand};
use std::path::PathBuf;

/// Fast recovery and rejuvenation of Linux virtual machines on stock QEMU/KVM.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110, arg_required_else_help = true, after_help = EXIT_STATUS)]
pub struct Cli {
    /// Print one JSON object instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_STATUS: &str = "\
Exit status: 0 done; 1 failed, the guest is unchanged; 2 wrong usage; 3 failed, the guest needs `rekindle recover`.";

/// Names that other programs use for our commands, each group with our name. Without this list the suggestion would be
/// a command that is only spelled alike.
const FOREIGN_NAMES: &[(&[&str], &str)] = &[
    (&["start", "boot", "create", "launch"], "run"),
    (&["list", "ps"], "status"),
    (&["info", "inspect", "dumpxml"], "show"),
    (&["shutdown", "kill", "destroy", "poweroff", "delete", "rm"], "stop"),
    (&["migrate"], "move"),
    (&["backup", "checkpoint", "snapshot"], "protect"),
    (&["upgrade"], "replace-qemu"),
    (&["exporter", "prometheus"], "metrics"),
    (&["suspend"], "host suspend"),
    (&["unpause"], "resume"),
    (&["check", "lint"], "validate"),
    (&["init"], "store init"),
];

/// Reads the command line, and the settings file of `rekindle protect`. Exits if the command line is wrong or requests help.
pub fn parse() -> Result<Cli, Usage> {
    let merged = settings::merge(std::env::args_os().collect())?;
    let parsed = command().try_get_matches_from(&merged.words).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command()))?;
        Ok((cli, matches))
    });
    let (mut cli, matches) = parsed.unwrap_or_else(|error| exit(error, merged.read_file.as_ref()));
    if let Command::Protect(protect) = &mut cli.command
        && let Some((_, given)) = matches.subcommand()
    {
        protect.merged = Settings { options: settings::options_of(given)?, ..merged.settings };
    }
    Ok(cli)
}

/// Reports a wrong command line, or prints the requested help, and exits.
fn exit(mut error: clap::Error, settings_file: Option<&PathBuf>) -> ! {
    let first_word = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let foreign = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(unknown)) if first_word.as_ref() == Some(unknown) => {
            FOREIGN_NAMES.iter().find(|(names, _)| names.contains(&unknown.as_str()))
        }
        _ => None,
    };
    if let Some((_, ours)) = foreign {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![(*ours).to_owned()]));
    }
    if let Some(path) = settings_file.filter(|_| error.use_stderr()) {
        let _ = error.print();
        eprintln!("note: options were also read from {}", path.display());
        std::process::exit(error.exit_code());
    }
    error.exit()
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a VM from its definition.
    ///
    /// Needs: the files that the definition names; room for its RAM; root for taps; if a failure has left a disk with a
    /// redo log, --newest-disk (or `rekindle restore` instead).
    ///
    /// On success: the guest boots in a QEMU that does not depend on this command.
    ///
    /// On failure: nothing is left behind.
    #[command(after_help = "\
Examples:
  rekindle run web.toml
  rekindle run web.toml --newest-disk")]
    Run(Run),
    /// List VMs and libvirt domains, their state and outdated QEMUs.
    ///
    /// Needs: root to see libvirt's domains.
    ///
    /// After an upgrade of QEMU, guests continue in the old one until it is replaced: `rekindle replace-qemu NAME`, or
    /// `rekindle replace-qemu --all-libvirt --outdated`.
    #[command(after_help = "\
Examples:
  rekindle status
  rekindle status web
  rekindle --json status")]
    Status(Status),
    /// List the VMs of this host and their state.
    #[command(hide = true)]
    Ls,
    /// Check a VM's definition, or the host's configuration.
    ///
    /// The file is read as `rekindle run` reads it. A file named host.toml is read as the host's configuration.
    ///
    /// On success: exit status 0; nothing was changed.
    ///
    /// On failure: exit status 2; each mistake has its line, its key and a remedy.
    #[command(after_help = "\
Examples:
  rekindle validate web.toml
  rekindle validate /etc/rekindle/host.toml")]
    Validate(Validate),
    /// Show a VM's definition, its QEMU and its helpers.
    #[command(after_help = "\
Examples:
  rekindle show web
  rekindle show web --timeline")]
    Show(Show),
    /// List what was done to VMs, and what went wrong.
    ///
    /// Operations with their outcome, the start and end of protection, stores that cannot be written, guests that rebooted
    /// themselves, helpers that died. The events of a VM are kept after it was stopped.
    ///
    /// With -f it runs until it is interrupted.
    #[command(after_help = "\
Examples:
  rekindle events
  rekindle events web -n 20
  rekindle --json events -f")]
    Events(Events),
    /// Connect to a VM's serial console; leave with Ctrl-].
    #[command(after_help = "\
Example:
  rekindle console web")]
    Console(NameOnly),
    /// Shut VMs down, and keep only their disks.
    ///
    /// Everything else that Rekindle keeps of them is removed.
    ///
    /// Needs: no other operation on the VM.
    ///
    /// On success: only its disks are left.
    ///
    /// On failure: the error names what could not be removed; the same command continues.
    #[command(after_help = "\
Examples:
  rekindle stop web --dry-run
  rekindle stop web db --timeout 2m")]
    Stop(Stop),
    /// Stop a guest until `rekindle resume`.
    ///
    /// The guest keeps its memory and its disks, and does not run. While it is paused, no checkpoints of it are taken; it
    /// stays paused when its QEMU is replaced.
    ///
    /// Needs: the VM runs, and Rekindle started it; no other operation on it.
    ///
    /// On success: the guest is paused, or was paused before.
    ///
    /// On failure: the guest continues to run.
    #[command(after_help = "\
Example:
  rekindle pause web")]
    Pause(NameOnly),
    /// Continue a guest that `rekindle pause` stopped.
    ///
    /// Needs: no other operation on the VM.
    ///
    /// On success: the guest runs.
    ///
    /// On failure: the guest is unchanged.
    #[command(after_help = "\
Example:
  rekindle resume web")]
    Resume(NameOnly),
    /// Adopt a QEMU that Rekindle did not start, to protect it.
    ///
    /// Needs: the right to trace it: root, or its user with kernel.yama.ptrace_scope=0.
    ///
    /// On success: it is a VM of this name; neither QEMU nor its guest was changed.
    ///
    /// On failure: nothing is left behind; the error names what cannot be protected or restored.
    #[command(after_help = "\
Examples:
  rekindle attach db --libvirt db
  rekindle attach db --qmp /run/db.qmp")]
    Attach(Attach),
    /// Release a QEMU that `rekindle attach` adopted.
    ///
    /// Overlays on its disks (protect --disk overlays) are merged first; the guest is stopped for the last part.
    ///
    /// Needs: no protector that takes checkpoints of it.
    ///
    /// On success: nothing of Rekindle is left in QEMU; the guest continues to run.
    ///
    /// On failure: the error names what could not be removed; the same command continues. A guest whose overlays were
    /// being merged may be stopped until then.
    #[command(after_help = "\
Example:
  rekindle detach db")]
    Detach(NameOnly),
    /// Replace the QEMU process under running guests.
    ///
    /// Works for VMs, libvirt's domains, and any other QEMU. For domains of libvirt, libvirt's daemon is stopped for a moment, once for all of
    /// them, and started again; it manages them afterwards as before.
    ///
    /// Needs: the VMs run; the new QEMU supports their machine type, CPU model and devices. For a domain or with --qmp:
    /// root, and what `--dry-run` names. docs/vmm-restart.md has the limits.
    ///
    /// On success: each guest runs in a new QEMU.
    ///
    /// On failure: exit status 1, the guest is unchanged; or 3, the guest needs `rekindle recover`.
    #[command(after_help = "\
Examples:
  rekindle replace-qemu web --qemu /opt/qemu-10/bin/qemu-system-x86_64
  rekindle replace-qemu db --dry-run
  rekindle replace-qemu web --rollback
  rekindle replace-qemu --all
  rekindle replace-qemu --all-libvirt
  rekindle replace-qemu mail --qmp /run/mail.qmp")]
    ReplaceQemu(RebootVmm),
    /// Reboot the operating system of a guest.
    ///
    /// The guest is shut down by its agent, or by the power button, or powered off after `shutdown_timeout`; then it
    /// boots.
    ///
    /// --how warm-cache: what the guest had cached of its disk is served from its previous memory, each block only if
    /// it matches the disk.
    ///
    /// --how kexec: the guest's own kernel starts the next one, without firmware and boot loader.
    ///
    /// --how phase: the guest continues from the latest state saved in an earlier boot whose disk blocks have not been
    /// written since. If there is none, the guest boots.
    ///
    /// Needs: the VM runs. warm-cache: a disk with `server = true`, and RAM that is not in huge pages. kexec: in the
    /// guest, qemu-guest-agent that may run programs, systemd and kexec-tools. phase: [phase] in the definition. --end
    /// freeze: qemu-guest-agent.
    ///
    /// On success: the guest boots, or runs from the saved state; after kexec its agent answers.
    ///
    /// On failure: exit status 1, the guest is unchanged; or 3, the guest needs `rekindle recover`.
    #[command(after_help = "\
Examples:
  rekindle reboot web
  rekindle reboot web --how warm-cache
  rekindle reboot web --how phase --end freeze --dry-run")]
    Reboot(Reboot),
    /// Reboot this host and keep its guests.
    ///
    /// Needs: root, systemd, `rekindle host init`; the method works for every VM, or --others selects another one.
    ///
    /// On success: the host shuts down; the guests resume during its next boot.
    ///
    /// On failure: exit status 1; all guests continue to run.
    #[command(after_help = "\
Examples:
  rekindle reboot-host --dry-run
  rekindle reboot-host --others saved")]
    RebootHost(RebootHost),
    /// Suspend and resume guests; prepare this host for reboots.
    #[command(
        subcommand,
        after_help = "\
Examples:
  rekindle host init --reserve 48G
  rekindle host suspend --all --dry-run"
    )]
    Host(Host),
    /// Finish or undo an interrupted operation.
    ///
    /// If no operation was interrupted and the guest's QEMU has died, the guest is booted.
    ///
    /// Interrupted replacements of the QEMUs of libvirt's domains are recovered together: they share libvirt's daemon.
    ///
    /// Needs: no other operation on the VM.
    ///
    /// On success: exactly one QEMU runs the guest; the output states whether its memory was kept. If the memory of a
    /// libvirt domain, or of another program's guest, is lost, no QEMU runs it, and the output states that: start it as usual.
    ///
    /// On failure: nothing was killed or started; exit status 3 if a QEMU that may run the guest does not answer. The
    /// command can be repeated.
    #[command(after_help = "\
Examples:
  rekindle recover web
  rekindle recover web --wait 5m")]
    Recover(Recover),
    /// Take checkpoints of a running VM into a store.
    ///
    /// Runs until it is interrupted or QEMU ends.
    ///
    /// Options that are not given are read from /etc/rekindle/protect/NAME.toml, if that exists.
    ///
    /// Needs: the VM runs; root, or the same user with kernel.yama.ptrace_scope=0; Linux 6.7.
    ///
    /// On success: the store holds the newest checkpoint; the guest continues to run.
    ///
    /// On failure: the guest continues to run; the store holds what was committed before. Only if the guest was
    /// restored from that store, or booted with it, on another host since then, it is ended here.
    #[command(after_help = "\
Examples:
  rekindle protect web --store /srv/checkpoints/web --dry-run
  rekindle protect web --store /srv/checkpoints/web
  rekindle protect web --store s3://checkpoints/web --environment-file /etc/rekindle/web.env --every 500ms
  rekindle protect web --store /srv/checkpoints/web --every 5s --install-service")]
    Protect(Protect),
    /// Release held network output and turn output commit off.
    ///
    /// Needs: the VM runs; no protector that takes checkpoints of it.
    ///
    /// On success: its network works without delay. A fail-over to its last checkpoint can undo what its clients see
    /// from now on.
    ///
    /// On failure: the output is still held.
    #[command(after_help = "\
Example:
  rekindle release web")]
    Release(NameOnly),
    /// Resume a guest from a checkpoint; its memory is loaded on demand.
    ///
    /// Needs: the store; room for the guest's RAM; no running VM of that name; a QEMU that supports its machine type.
    ///
    /// On success: the guest runs, and a pager loads the rest of its memory. With --prepare: a QEMU waits with empty
    /// RAM, and the store is unchanged.
    ///
    /// On failure: nothing is left behind; the checkpoint is unchanged. A prepared QEMU still waits, unless it had
    /// already loaded the guest's state.
    #[command(after_help = "\
Examples:
  rekindle restore web --store /srv/checkpoints/web
  rekindle restore web --store /srv/checkpoints/web --prepare")]
    Restore(Restore),
    /// Move a running guest to another host.
    ///
    /// Both hosts reach the same store and disk images. The guest's memory is loaded on demand on the other host.
    ///
    /// Needs: the VM runs, with disks that Rekindle serves or that are read-only; ssh to the other host, and rekindle
    /// there. Or the VM is an attached domain of libvirt, and libvirt runs there, too.
    ///
    /// On success: the guest runs there; nothing of it is left here, except libvirt's definition of a domain.
    ///
    /// On failure: the guest continues here. With exit status 3: do first what the error names; no two hosts run the
    /// guest.
    #[command(after_help = "\
Examples:
  rekindle move web --to host2 --store /srv/checkpoints/web --dry-run
  rekindle move web --to host2 --store /srv/checkpoints/web
  rekindle move domain --to host2 --store /srv/checkpoints/domain --preview")]
    Move(Move),
    /// Receive a guest from another host: `rekindle move` starts this over ssh and sends requests on standard input.
    #[command(hide = true)]
    Receive,
    /// Load the rest of a restored VM's memory if its pager ended.
    ///
    /// `rekindle restore` starts a pager, and `rekindle recover` another one if it has died.
    ///
    /// Needs: a restored VM whose memory is not complete, and no other pager.
    ///
    /// On success: all of the guest's memory is loaded.
    ///
    /// On failure: access to a missing page waits; the command can be repeated.
    #[command(after_help = "\
Example:
  rekindle pager web")]
    Pager(Pager),
    /// Save the phases of its boot that a VM's guest announces, or its health check detects, until the VM is stopped.
    ///
    /// Needs: a VM with [phase] in its definition. `rekindle run` and `rekindle recover` start this.
    ///
    /// On success: the VM was stopped, or another process already does this.
    ///
    /// On failure: later phases are not saved; the guest continues to boot.
    #[command(hide = true)]
    Phases(NameOnly),
    /// Restart helpers of a VM that die, rotate its logs, and boot its guest when it reboots or panics, until the VM is
    /// stopped.
    ///
    /// Needs: a VM. `rekindle run`, `restore`, `reboot` and `recover` start this.
    ///
    /// On success: the VM was stopped, or another process already does this.
    ///
    /// On failure: a guest that has rebooted or panicked stays stopped; `rekindle recover` boots it.
    #[command(hide = true)]
    Watch(NameOnly),
    /// Create, list, verify, compact, export and import stores.
    #[command(
        subcommand,
        after_help = "\
Examples:
  rekindle store init /srv/checkpoints/web
  rekindle store ls /srv/checkpoints/web"
    )]
    Store(Store),
    /// Serve a guest's disk and retain its cache over a reboot.
    #[command(
        subcommand,
        after_help = "\
Example:
  rekindle disk serve disk.raw --socket d.sock"
    )]
    Disk(Disk),
    /// Start, stop, move and monitor a VM for a cluster manager.
    ///
    /// The resource agent `ocf:rekindle:vm` of Pacemaker calls these commands.
    #[command(
        subcommand,
        after_help = "\
Example:
  rekindle ocf show-config web --store s3://checkpoints/web"
    )]
    Ocf(Ocf),
    /// Probe a service and report its longest silence.
    #[command(after_help = "\
Examples:
  rekindle probe http://10.0.0.2/ --every 1ms
  rekindle probe echo://10.0.0.2:7 --duration 1m")]
    Probe(Probe),
    /// Record free resources of the host and guests at intervals.
    ///
    /// `rekindle-lab aging` reads the record.
    ///
    /// Needs: nothing. Values from inside a guest need qemu-guest-agent there.
    ///
    /// On success: the file has complete lines for each sample.
    ///
    /// On failure: the file has the earlier samples.
    #[command(after_help = "\
Examples:
  rekindle monitor --out samples.jsonl
  rekindle monitor web --service web=http://10.0.0.2/ --every 10s")]
    Monitor(Monitor),
    /// Serve metrics and a live page of this host's guests by HTTP.
    ///
    /// Runs until it is interrupted. It reads files and /proc only: no guest, QEMU or helper notices it. docs/metrics.md
    /// has the metrics and the alert rules, docs/page.md describes the page.
    ///
    /// Needs: the right to read the run directories. An ordinary user serves the figures of its own VMs; root those of
    /// root's VMs and of libvirt's domains.
    ///
    /// On success: http://127.0.0.1:19750/metrics has the figures at the time of each request, and a browser shows the
    /// page at http://127.0.0.1:19750/.
    ///
    /// On failure: the address cannot be used.
    #[command(after_help = "\
Examples:
  rekindle metrics
  rekindle metrics --listen 192.0.2.1:19750")]
    Metrics(Metrics),
    /// Check this host, or one guest, for problems and suggest fixes.
    ///
    /// Needs: with NAME: the VM or domain runs; the rights that the techniques need.
    ///
    /// With NAME, it also checks what each technique would do to that guest, and measures for 10 s how much memory its
    /// checkpoints would contain. Nothing is changed.
    #[command(after_help = "\
Examples:
  rekindle doctor
  rekindle doctor web
  rekindle doctor --qemu /opt/qemu-10/bin/qemu-system-x86_64")]
    Doctor(Doctor),
    /// Print shell completions.
    #[command(hide = true)]
    Completions(Completions),
    /// Print the names of VMs and libvirt domains, for shell completions.
    #[command(hide = true)]
    Names,
    /// Write the man pages to a directory.
    #[command(hide = true)]
    Man(Man),
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests")]
mod tests {
    use super::Cli;
    use clap::{Command, CommandFactory, Parser};

    /// Calls `check` for each visible command below `command`, with its path, such as `rekindle store ls`.
    fn for_each_command(command: &Command, path: &str, check: &mut dyn FnMut(&Command, &str)) {
        let visible = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
        for subcommand in command.get_subcommands().filter(visible) {
            let path = format!("{path} {}", subcommand.get_name());
            check(subcommand, &path);
            for_each_command(subcommand, &path, check);
        }
    }

    #[test]
    fn reboot_accepts_a_name_and_the_names_of_previous_releases() {
        let parse = |words: &str| Cli::try_parse_from(words.split_whitespace()).map(|cli| format!("{:?}", cli.command));
        for (words, parsed) in [
            ("rekindle reboot web --how kexec", "previous_name: None, guest: Some(RebootOs"),
            ("rekindle reboot -- vmm", "previous_name: None, guest: Some(RebootOs"),
            ("rekindle reboot os web", "previous_name: Some(Os(RebootOs"),
            ("rekindle reboot vmm web --rollback", "previous_name: Some(Vmm(RebootVmm"),
            ("rekindle reboot host --dry-run", "previous_name: Some(Host(RebootHost"),
            ("rekindle reboot-host --dry-run", "RebootHost(RebootHost"),
            ("rekindle ls", "Ls"),
        ] {
            let command = parse(words).unwrap_or_else(|e| panic!("{words}: {e}"));
            assert!(command.contains(parsed), "{words}: {command}");
        }
        for words in ["rekindle reboot", "rekindle reboot vmm", "rekindle reboot os", "rekindle reboot web db"] {
            assert!(parse(words).is_err(), "{words}");
        }
    }

    #[test]
    fn the_help_of_each_command_has_a_summary_and_examples_that_parse() {
        let mut examples = 0;
        for_each_command(&Cli::command(), "rekindle", &mut |command, path| {
            let summary = command.get_about().map(ToString::to_string).unwrap_or_default();
            assert!(summary.starts_with(char::is_uppercase) && !summary.ends_with('.'), "{path}: {summary}");
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<_> = help.lines().filter_map(|line| line.strip_prefix("  ")).collect();
            assert!(help.starts_with("Example") && !lines.is_empty(), "{path}: no example in {help:?}");
            for line in lines {
                let our_part = line.rsplit("&& ").next().unwrap_or(line).split(" | ").next().unwrap_or(line);
                assert!(our_part.replace(" --json", "").starts_with(path), "{path}: {line} is another command");
                if let Err(e) = Cli::command().try_get_matches_from(our_part.split_whitespace()) {
                    panic!("{line}: {e}");
                }
                examples += 1;
            }
        });
        assert!(examples > 30, "{examples} examples");
    }
}
