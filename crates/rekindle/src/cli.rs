//! Commands and flags, declared once: help, completions and man pages come from here.

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use rekindle_protect::policy::Policy;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::{Bytes, Name, Span};
use std::path::PathBuf;

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
    /// On failure: nothing runs that did not before; it can be done again.
    Recover(NameOnly),
    /// Take checkpoints of a running VM into a store, until interrupted or until its QEMU ends.
    ///
    /// Needs: the VM runs; root, or the same user with kernel.yama.ptrace_scope=0; Linux 6.7.
    /// On success: the store holds the newest checkpoint; the guest runs on.
    /// On failure: the guest runs on; the store holds what was committed before.
    Protect(Protect),
    /// Let a guest go on from a checkpoint; its memory comes on demand.
    ///
    /// Needs: the store; room for the guest's RAM; no VM of that name that runs; a QEMU that knows its machine.
    /// On success: the guest runs; a pager brings what of its memory is not there yet. With --prepare: a QEMU waits with empty
    /// RAM, and the store is as it was.
    /// On failure: nothing is left behind; the checkpoint is where it was. What was prepared waits on, unless the guest's
    /// state had been given to it already.
    Restore(Restore),
    /// Bring the memory of a restored VM, if the pager that `rekindle restore` started has ended.
    ///
    /// Needs: a restore that is still filling, and no other pager.
    /// On success: all of the guest's memory is there.
    /// On failure: whoever needs a missing page waits; it can be started again.
    Pager(Pager),
    /// Reboot a VM with a warm cache when its guest reboots itself or panics, until it is gone.
    ///
    /// Needs: a VM with `on_reboot` or `on_crash` = "warm-cache". `rekindle run` and `recover` start one.
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
    /// Watch a service and tell its gaps: the longest silence a client sees.
    Probe(Probe),
    /// Tell what this host lacks, and the mend.
    Doctor(Doctor),
    /// Write shell completions to standard output.
    #[command(hide = true)]
    Completions(Completions),
    /// Write the man pages into a directory.
    #[command(hide = true)]
    Man(Man),
}

#[derive(Debug, Subcommand)]
pub enum Reboot {
    /// Replace the QEMU process of VMs, under running guests.
    ///
    /// Needs: the VMs run; the new QEMU knows their machine type, CPU model and devices.
    /// On success: each guest runs in a new QEMU.
    /// On failure: exit status 1 and the guest as it was, or 3 and `rekindle recover` to decide.
    Vmm(RebootVmm),
    /// Reboot the guest's system: shut it down, by its agent or the power button, and boot it.
    ///
    /// Needs: the VM runs; for --how warm-cache a disk with `server = true`, and RAM that is not in huge pages.
    /// On success: the guest boots. With --how warm-cache it is given what it had cached of its disk from its former memory, each block
    /// only if it is what is on the disk.
    /// On failure: exit status 1 and the guest as it was, or 3 and `rekindle recover` to decide.
    Os(RebootOs),
    /// Reboot this host under its guests.
    ///
    /// Needs: root, systemd, `rekindle host init`; every VM can be carried in its way, or --others says what becomes of it.
    /// On success: the host goes down; in its next boot the guests go on.
    /// On failure: exit status 1, and all guests run as before.
    Host(RebootHost),
}

#[derive(Debug, Subcommand)]
pub enum Host {
    /// Set RAM aside that outlives this host's kernel, and install what suspends and resumes guests.
    ///
    /// Needs: root for --write; systemd, kexec-tools; a kernel with legacy persistent memory, DAX and kexec.
    /// On success: without --write, told what would be done; with it, done. It can be done again at any time.
    /// On failure: what is in the way is named; what was done before stays, and the same command goes on.
    Init(HostInit),
    /// Mount the RAM that outlives this host's kernel, as a boot does: kept if suspended guests are in it, else new and empty.
    Mount,
    /// Suspend all guests: their QEMUs end, and `rekindle host resume` lets them go on.
    ///
    /// Needs: the VMs run, and can be carried; none is suspended still.
    /// On success: no VM runs.
    /// On failure: all guests go on.
    Suspend(HostSuspend),
    /// Let all suspended guests go on.
    ///
    /// Needs: their disks and bridges.
    /// On success: each goes on with its memory, or is booted where that is lost, which is said.
    /// On failure: exit status 3; those that did not go on are named, and `rekindle recover` lets them.
    Resume,
}

#[derive(Debug, Args)]
pub struct HostInit {
    /// How much RAM guests may have, e.g. 48G.
    #[arg(long, value_name = "SIZE")]
    pub reserve: Bytes,
    /// The address at which it begins [default: such that it ends with the machine's highest RAM].
    #[arg(long, value_name = "SIZE")]
    pub start: Option<Bytes>,
    /// Do it, instead of telling what would be done.
    #[arg(long)]
    pub write: bool,
}

#[derive(Debug, Args)]
pub struct HostSuspend {
    /// What becomes of guests' RAM. `warm` outlives a reboot of the host only where it is in reserved RAM.
    #[arg(long, value_enum, default_value_t = How::Warm)]
    pub how: How,
    /// As `rekindle reboot host` has planned it; without a plan, nothing.
    #[arg(long, hide = true, conflicts_with = "how")]
    pub planned: bool,
}

#[derive(Debug, Args)]
pub struct RebootHost {
    /// What becomes of guests and of their RAM.
    #[arg(long, value_enum, default_value_t = How::Warm)]
    pub how: How,
    /// What becomes of VMs that cannot be carried so.
    #[arg(long, value_enum, default_value_t = Others::Refuse)]
    pub others: Others,
    /// Only tell what would become of each VM.
    #[arg(long)]
    pub dry_run: bool,
}

/// What becomes of VMs that cannot be carried as is wanted.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Others {
    /// The host is not rebooted.
    Refuse,
    /// Their RAM goes to disk.
    Saved,
    /// They are shut down, and booted again.
    Cold,
}

#[derive(Debug, Subcommand)]
pub enum Store {
    /// List the checkpoints of a store, its owner, and what it takes on the disk.
    Ls(StoreAt),
    /// Look at every byte of a store that counts, and name what is bad.
    ///
    /// Needs: to read the store. It may be in use.
    /// On success: all is well.
    /// On failure: exit status 1, with each bad thing named; nothing was changed.
    Verify(StoreAt),
    /// Free all room of a store that can be freed.
    ///
    /// Needs: that nothing protects a VM into it: this becomes its owner.
    /// On success: hardly more than the kept checkpoints is left.
    /// On failure: the store is as it was.
    Compact(StoreAt),
    /// Write a checkpoint as a stream that stock QEMU loads with -incoming.
    ///
    /// Needs: to read the store.
    /// On success: the file is there, whole.
    /// On failure: there is no file; what went to standard output is no whole stream, and no QEMU takes it for one.
    Export(StoreExport),
    /// Read a stream that was exported, or saved by QEMU, into a store as its next checkpoint.
    ///
    /// Needs: that nothing protects a VM into it: this becomes its owner.
    /// On success: the checkpoint can be restored.
    /// On failure: the store is as it was.
    Import(StoreImport),
    /// Keep stores for other hosts, at tls://THIS-HOST:PORT/NAME.
    ///
    /// Needs: a certificate, and the authority that has signed those of the clients.
    /// On success: serves until it is interrupted.
    Serve(StoreServe),
}

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Serve a raw image or a block device to a QEMU, by vhost-user.
    ///
    /// QEMU is given it by: -chardev socket,id=d,path=SOCKET,reconnect=1 -device vhost-user-blk-pci,chardev=d, and memory that is
    /// shared (memory-backend-file or memory-backend-memfd with share=on).
    ///
    /// Needs: an image that nobody else has open; io_uring.
    /// On success: serves until it is interrupted or told to end; what the guest has flushed is on the disk.
    /// On failure: exit status 1; the image is as it was.
    Serve(DiskServe),
    /// Tell what a server does, and what it knows of its guest's cache.
    Status(DiskAt),
    /// Hold a disk to a rate, or do not any more.
    Limit(DiskLimit),
    /// The image has become longer: let the guest see it when it looks again.
    Resize(DiskAt),
    /// The guest has ended: use its memory as a cache for the next one.
    ///
    /// Needs: that no QEMU uses the disk just now.
    /// On success: blocks that the guest still had are served from there, if they are what is on the disk.
    /// On failure: the next guest reads everything from the disk.
    Keep(DiskAt),
    /// Use the former guest's memory no more, and give it back.
    Drop(DiskAt),
    /// Merge the redo log of a disk into its image.
    ///
    /// Needs: the control socket of the disk's server, or the image, which nobody has open then.
    /// On success: the image is the newest disk, and has no log; the disk of no checkpoint is to be had any more.
    /// On failure: exit status 1; the log is still there, and can be merged again.
    Merge(DiskMerge),
    /// End a server.
    End(DiskAt),
}

#[derive(Debug, Args)]
pub struct DiskServe {
    /// The image: a raw file or a block device.
    pub image: PathBuf,
    /// The socket for QEMU.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// The socket for the other commands here [default: the one for QEMU, with .control behind it].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Refuse writes.
    #[arg(long)]
    pub readonly: bool,
    /// The serial number that the guest sees, at most 20 bytes.
    #[arg(long, default_value = "")]
    pub serial: String,
    /// Queues that the guest may have.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
    /// Through the host's page cache.
    #[arg(long)]
    pub buffered: bool,
    /// Do not remember where blocks are: a reboot finds a cold cache.
    #[arg(long)]
    pub no_map: bool,
    /// Give the former guest's memory up after so long [default: when the guest needs the room].
    #[arg(long, value_name = "TIME")]
    pub attic_keep: Option<Span>,
    /// A restore still brings the guest's memory: wait for pages that are missing.
    #[arg(long, hide = true)]
    pub filling: bool,
    #[command(flatten)]
    pub rate: DiskRate,
    /// The directory of its redo log [default: IMAGE.redo; a block device has none].
    #[arg(long, value_name = "DIR")]
    pub redo: Option<PathBuf>,
    /// Bytes that its redo log may take [default: a quarter of the disk, at least 4G].
    #[arg(long, value_name = "BYTES")]
    pub redo_limit: Option<Bytes>,
    /// Serve the disk of a checkpoint: of its redo log only what was written up to this epoch. The rest is given up when the guest writes.
    #[arg(long, value_name = "N", requires = "disk_id")]
    pub epoch: Option<u64>,
    /// The identity that the disk must have.
    #[arg(long, value_name = "UUID", requires = "epoch")]
    pub disk_id: Option<uuid::Uuid>,
}

#[derive(Debug, Args)]
pub struct DiskMerge {
    /// The image, or the control socket of its server.
    #[arg(value_name = "IMAGE|CONTROL")]
    pub image: PathBuf,
    /// The directory of its redo log [default: IMAGE.redo].
    #[arg(long, value_name = "DIR")]
    pub redo: Option<PathBuf>,
    /// Through the host's page cache.
    #[arg(long)]
    pub buffered: bool,
}

#[derive(Debug, Args)]
pub struct DiskRate {
    /// Bytes in a second, e.g. 90M [default: no limit].
    #[arg(long, value_name = "BYTES")]
    pub bps: Option<Bytes>,
    /// Requests in a second [default: no limit].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DiskAt {
    /// The server's control socket.
    pub control: PathBuf,
}

#[derive(Debug, Args)]
pub struct DiskLimit {
    #[command(flatten)]
    pub at: DiskAt,
    #[command(flatten)]
    pub rate: DiskRate,
}

/// Who we are to a server.
#[derive(Debug, Args)]
pub struct Tls {
    /// Our certificate, for a store on a server (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"])]
    pub cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// The authority that has signed the server's certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub ca: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct StoreAt {
    /// The store: a directory, or tls://HOST:PORT/NAME.
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
}

#[derive(Debug, Args)]
pub struct StoreExport {
    #[command(flatten)]
    pub from: StoreAt,
    /// Number of the checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// The file to be made; `-` for standard output.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// Machine type, e.g. pc-q35-10.0: needed by a QEMU without `-global migration.send-configuration=off`.
    #[arg(long, value_name = "TYPE")]
    pub machine: Option<String>,
}

#[derive(Debug, Args)]
pub struct StoreImport {
    #[command(flatten)]
    pub to: StoreAt,
    /// The stream; `-` for standard input.
    pub file: PathBuf,
    /// Name of the VM, for a store that is to be made.
    #[arg(long)]
    pub name: Option<Name>,
    /// Its UUID [default: a new one].
    #[arg(long, requires = "name")]
    pub uuid: Option<uuid::Uuid>,
    /// How many checkpoints are kept.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
}

#[derive(Debug, Args)]
pub struct StoreServe {
    /// Where to listen.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: String,
    /// The directory of the stores.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// The server's certificate (PEM).
    #[arg(long, value_name = "FILE")]
    pub cert: PathBuf,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// The authority that has signed the clients' certificates (PEM).
    #[arg(long, value_name = "FILE")]
    pub client_ca: PathBuf,
    /// How long a client may be idle.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub idle: Span,
}

#[derive(Debug, Args)]
pub struct Run {
    /// The VM's definition (TOML).
    pub file: PathBuf,
    /// The QEMU to use instead of the one that the definition names.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// A failure has left disks with a redo log: start from the newest ones. The disks of the last checkpoint are given up.
    #[arg(long)]
    pub newest_disk: bool,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("monitor").required(true).args(["qmp", "libvirt"]))]
pub struct Attach {
    /// What the VM is to be called here.
    pub name: Name,
    /// A QMP socket of the QEMU, which nobody else uses.
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// The libvirt domain that it is: name, number or UUID.
    #[arg(long, value_name = "DOMAIN")]
    pub libvirt: Option<String>,
    /// libvirt's connection URI [default: as virsh chooses].
    #[arg(long, value_name = "URI", requires = "libvirt")]
    pub connect: Option<String>,
}

#[derive(Debug, Args)]
pub struct Show {
    /// The VM.
    pub name: Name,
    /// Draw what was done to it as bars over time.
    #[arg(long)]
    pub timeline: bool,
}

#[derive(Debug, Args)]
pub struct NameOnly {
    /// The VM.
    pub name: Name,
}

#[derive(Debug, Args)]
pub struct Pager {
    /// The VM.
    pub name: Name,
    /// Tell on standard input, a socket, when it could begin, and wait for the one before to end.
    #[arg(long, hide = true)]
    pub hand_over: bool,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// The VMs.
    #[arg(required = true)]
    pub names: Vec<Name>,
    /// Pull the plug: do not ask the guest.
    #[arg(long)]
    pub now: bool,
    /// How long the guest may take to shut down before the plug is pulled [default: the definition's].
    #[arg(long, conflicts_with = "now", value_name = "TIME")]
    pub timeout: Option<Span>,
}

/// How a VMM is replaced.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum How {
    /// The guest's RAM stays where it is: stopped for milliseconds.
    Warm,
    /// The guest's RAM goes to disk and back.
    Saved,
    /// The guest is shut down and booted.
    Cold,
}

#[derive(Debug, Args)]
pub struct RebootVmm {
    /// The VMs.
    #[arg(required_unless_present = "all")]
    pub names: Vec<Name>,
    /// All VMs that run.
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// How.
    #[arg(long, value_enum, default_value = "warm")]
    pub how: How,
    /// The QEMU to run from now on [default: the one that runs].
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Back to the QEMU before the last upgrade.
    #[arg(long, conflicts_with = "qemu")]
    pub rollback: bool,
    /// Compare all of the guest's memory before and after, while it is stopped (takes seconds per GiB).
    #[arg(long)]
    pub verify_memory: bool,
}

#[derive(Debug, Args)]
pub struct RebootOs {
    /// The VM.
    pub name: Name,
    /// How [default: warm-cache if a disk has a server, else cold].
    #[arg(long, value_enum)]
    pub how: Option<HowOs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HowOs {
    /// Its memory is gone.
    Cold,
    /// What it had cached of its disk is there again.
    WarmCache,
}

#[derive(Debug, Args)]
pub struct Protect {
    /// The VM.
    pub name: Name,
    /// Where checkpoints go: a directory, or tls://HOST:PORT/NAME.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
    /// Time from one checkpoint to the next.
    #[arg(long, default_value = "2s", value_name = "TIME")]
    pub every: Span,
    /// What is copied when: basic, cow or precopy [default: precopy; cow for a VM with O_DIRECT disks].
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<Policy>,
    /// How many checkpoints are kept.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,
    /// Tell when the newest checkpoint is older than this.
    #[arg(long, value_name = "TIME")]
    pub max_lag: Option<Span>,
    /// For a VM that writes disks: a restored guest may find them newer than its memory.
    #[arg(long, value_enum, value_name = "RULE")]
    pub disk: Option<DiskRule>,
    /// A command that snapshots the disks; it runs while the guest is stopped.
    #[arg(long, value_name = "COMMAND", conflicts_with = "disk")]
    pub disk_hook: Option<String>,
    /// End after so many checkpoints, and leave no trace in QEMU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Then compare all of the guest's memory with the newest checkpoint, while it is stopped (takes seconds per GiB).
    #[arg(long, requires = "count")]
    pub compare: bool,
}

#[derive(Debug, Args)]
pub struct Restore {
    /// The VM.
    pub name: Name,
    /// Where its checkpoints are: a directory, or tls://HOST:PORT/NAME.
    #[arg(long, value_name = "URL")]
    pub store: StoreUrl,
    #[command(flatten)]
    pub tls: Tls,
    /// The checkpoint [default: the newest].
    #[arg(long, value_name = "N")]
    pub at: Option<u64>,
    /// Bring all memory before the guest goes on.
    #[arg(long)]
    pub eager: bool,
    /// Only start a QEMU that waits with empty RAM: the next restore is a load and a resume.
    #[arg(long, conflicts_with_all = ["at", "eager"])]
    pub prepare: bool,
    /// How the VM is to be built here [default: as on the host of the checkpoint].
    #[arg(long, value_name = "FILE")]
    pub definition: Option<PathBuf>,
    /// The QEMU to use instead of the one that the definition names.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
}

/// What of disks that a protected guest writes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DiskRule {
    /// After a restore they are as after a power failure, and newer than the guest's memory.
    CrashConsistent,
}

#[derive(Debug, Args)]
pub struct Probe {
    /// http://HOST[:PORT]/PATH (keep-alive), tcp://HOST:PORT (connects) or echo://HOST:PORT (one open connection).
    pub url: String,
    /// Time between requests.
    #[arg(long, default_value = "10ms", value_name = "TIME")]
    pub every: Span,
    /// How long to watch [default: until interrupted].
    #[arg(long, value_name = "TIME")]
    pub duration: Option<Span>,
    /// A request with no answer for this long has failed.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    pub timeout: Span,
    /// Connections side by side.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub connections: usize,
    /// Width of the intervals in which throughput is counted.
    #[arg(long, default_value = "100ms", value_name = "TIME")]
    pub interval: Span,
    /// Probe from inside this network namespace.
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
    /// With --json: also one line per interval and gap as they come.
    #[arg(long)]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// The QEMU to look at.
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "PATH")]
    pub qemu: PathBuf,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// The directory.
    pub directory: PathBuf,
}
