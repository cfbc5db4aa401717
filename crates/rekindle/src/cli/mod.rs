//! Commands and flags, declared once: help, completions and man pages come from here. Each group of commands has a file.

mod disk;
mod host;
mod moving;
mod ocf;
mod protect;
mod reboot;
mod store;
mod tools;
mod vm;

pub use disk::{Disk, DiskAt, DiskLimit, DiskMerge, DiskRate, DiskServe};
pub use host::{Host, HostInit, HostSuspend, Others, RebootHost};
pub use moving::{Far, Move};
pub use ocf::{HowStop, Ocf, OcfMigrate, OcfMonitor, OcfResource, OcfStop};
pub use protect::{DiskRule, Pager, Protect, Restore};
pub use reboot::{EndOs, How, HowOs, Reboot, RebootOs, RebootVmm};
pub use store::{Store, StoreAt, StoreExport, StoreImport, StoreServe, Tls};
pub use tools::{Completions, Doctor, Man, Monitor, Probe};
pub use vm::{Attach, NameOnly, Recover, Run, Show, Stop};

use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};

/// Fast recovery and rejuvenation of Linux virtual machines on stock QEMU/KVM.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110, arg_required_else_help = true, after_help = EXIT_STATUS)]
pub struct Cli {
    /// Write one JSON object for machines instead of lines for people.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_STATUS: &str = "\
Exit status: 0 done; 1 failed, and the guest is as it was; 2 wrong usage; 3 failed, and the guest needs `rekindle recover`.";

/// What our commands are called elsewhere: a word that is only spelled alike would be suggested otherwise.
const ELSEWHERE: &[(&[&str], &str)] = &[
    (&["start", "boot", "create", "launch"], "run"),
    (&["list", "ps", "status"], "ls"),
    (&["info", "inspect", "dumpxml"], "show"),
    (&["shutdown", "kill", "destroy", "poweroff", "delete", "rm"], "stop"),
    (&["migrate"], "move"),
    (&["backup", "checkpoint", "snapshot"], "protect"),
    (&["upgrade", "replace-qemu"], "reboot vmm"),
    (&["suspend"], "host suspend"),
    (&["resume"], "host resume"),
    (&["reboot-host"], "reboot host"),
    (&["init"], "store init"),
];

/// Reads the command line. Ends the process where it is wrong, or asks for help.
pub fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|mut error| {
        let first = std::env::args().skip(1).find(|word| !word.starts_with('-'));
        let wrong = match error.get(ContextKind::InvalidSubcommand) {
            Some(ContextValue::String(wrong)) if first.as_ref() == Some(wrong) => wrong.as_str(),
            _ => error.exit(),
        };
        if let Some((_, ours)) = ELSEWHERE.iter().find(|(words, _)| words.contains(&wrong)) {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![(*ours).to_owned()]));
        }
        error.exit()
    })
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a VM from its definition.
    ///
    /// Needs: the files that the definition names; room for its RAM; root for taps; where a failure has left a disk with a redo log,
    /// --newest-disk (or rekindle restore).
    /// On success: the guest boots in a QEMU that does not depend on this command.
    /// On failure: nothing is left behind.
    Run(Run),
    /// List the VMs.
    Ls,
    /// Show a VM: what it is made of, every default filled in, and what runs it.
    Show(Show),
    /// Connect this terminal to a VM's serial console; leave it with Ctrl-].
    Console(NameOnly),
    /// Shut a VM down and remove what Rekindle keeps of it.
    ///
    /// Needs: nothing else at work on the VM.
    /// On success: nothing of it is left but its disks.
    /// On failure: what could not be removed is named; the same command goes on.
    Stop(Stop),
    /// Adopt a QEMU that Rekindle has not started, so that it can be protected.
    ///
    /// Needs: the right to trace it: root, or its user with kernel.yama.ptrace_scope=0; what cannot be protected or restored is named.
    /// On success: it is a VM of this name; neither QEMU nor its guest was changed.
    /// On failure: nothing is left behind.
    Attach(Attach),
    /// Let go of a QEMU that Rekindle has not started.
    ///
    /// Needs: nobody takes checkpoints of it.
    /// On success: nothing of Rekindle is left in QEMU; the guest runs on.
    /// On failure: what could not be taken away is named; the same command goes on.
    Detach(NameOnly),
    /// Reboot something under, or in, a VM.
    #[command(subcommand)]
    Reboot(Reboot),
    /// Suspend and resume all guests, and set this host up for being rebooted under them.
    #[command(subcommand)]
    Host(Host),
    /// Finish or undo an operation that was cut off, or boot a guest whose QEMU has died.
    ///
    /// Needs: nothing else at work on the VM.
    /// On success: exactly one QEMU runs the guest; what became of its memory is said.
    /// On failure: nothing was killed or started; exit status 3 if a QEMU that may run the guest does not answer. It can be done again.
    Recover(Recover),
    /// Take checkpoints of a running VM into a store, until interrupted or until its QEMU ends.
    ///
    /// Needs: the VM runs; root, or the same user with kernel.yama.ptrace_scope=0; Linux 6.7.
    /// On success: the store holds the newest checkpoint; the guest runs on.
    /// On failure: the guest runs on; the store holds what was committed before. Only where the guest was restored or booted on another
    /// host since, from or with that store, it is ended here.
    Protect(Protect),
    /// Let out what a guest has sent and `rekindle protect --output-commit` has held, and hold nothing more.
    ///
    /// Needs: the VM runs; nobody takes checkpoints of it.
    /// On success: its network is as it was. A fail-over to its last checkpoint may take back what its clients have seen from now on.
    /// On failure: it is held still.
    Release(NameOnly),
    /// Let a guest go on from a checkpoint; its memory comes on demand.
    ///
    /// Needs: the store; room for the guest's RAM; no VM of that name that runs; a QEMU that knows its machine.
    /// On success: the guest runs; a pager brings what of its memory is not there yet. With --prepare: a QEMU waits with empty
    /// RAM, and the store is as it was.
    /// On failure: nothing is left behind; the checkpoint is where it was. What was prepared waits on, unless the guest's
    /// state had been given to it already.
    Restore(Restore),
    /// Let a running guest go on on another host, which reaches the same store and disk images; its memory comes on demand there.
    ///
    /// Needs: the VM runs, with disks that Rekindle serves, or that are only read; ssh to the other host, and rekindle there.
    /// On success: the guest runs there; nothing of it is left here.
    /// On failure: it goes on here. With exit status 3: what is said has to be done first; no two hosts run it.
    Move(Move),
    /// Take a guest from another host: what `rekindle move` starts here over ssh, and speaks to on standard input.
    #[command(hide = true)]
    Receive,
    /// Bring the memory of a restored VM, if the pager that `rekindle restore` started has ended.
    ///
    /// Needs: a restore that is still filling, and no other pager.
    /// On success: all of the guest's memory is there.
    /// On failure: whoever needs a missing page waits; it can be started again.
    Pager(Pager),
    /// Save the phases of its boot that a VM's guest announces, or its health check sees, until it is gone.
    ///
    /// Needs: a VM with [phase] in its definition. `rekindle run` and `recover` start one.
    /// On success: the VM is gone, or another one waits already.
    /// On failure: later phases are not saved; the guest boots on.
    #[command(hide = true)]
    Phases(NameOnly),
    /// Restart helpers of a VM that die, rotate its logs, and reboot its guest when it reboots itself or panics, until the VM is gone.
    ///
    /// Needs: a VM. `rekindle run`, `restore`, `reboot` and `recover` start one.
    /// On success: the VM is gone, or another one waits already.
    /// On failure: a guest that has rebooted itself or panicked stays stopped; `rekindle recover` boots it.
    #[command(hide = true)]
    Watch(NameOnly),
    /// Look after fail-over images: what `rekindle protect` writes and `rekindle restore` reads.
    #[command(subcommand)]
    Store(Store),
    /// Serve a guest's disk, and keep its cache warm over a reboot.
    #[command(subcommand)]
    Disk(Disk),
    /// What the resource agent `ocf:rekindle:vm` of a cluster manager does.
    #[command(subcommand)]
    Ocf(Ocf),
    /// Watch a service and tell its gaps: the longest silence a client sees.
    Probe(Probe),
    /// Write what the host and its guests have left, time after time, for `rekindle-lab aging`.
    ///
    /// Needs: nothing. What is inside a guest is told by its qemu-guest-agent, where there is one.
    /// On success: the file has a line for each look, all of them whole.
    /// On failure: it has what was written before.
    Monitor(Monitor),
    /// Tell what this host lacks, and the mend.
    Doctor(Doctor),
    /// Write shell completions to standard output.
    #[command(hide = true)]
    Completions(Completions),
    /// Write the man pages into a directory.
    #[command(hide = true)]
    Man(Man),
}
