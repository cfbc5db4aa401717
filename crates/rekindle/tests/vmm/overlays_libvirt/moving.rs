//! `rekindle move` of a domain between two hosts, each with a libvirt of its own. Images and store are on file systems that
//! both have. A script in place of `ssh` runs the other host's Rekindle.

use super::{TPM, URI, assert_both_agree, define, make_disks, read_both, write_both};
use crate::attach::protect;
use crate::common::lab::entries;
use crate::common::protector::Protector;
use crate::common::{CommandResult, DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_testing::libvirt::{Domain, DomainOptions, Firmware, PrivateLibvirt};
use rekindle_testing::tpm::Tpm;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const OVERLAYS: [&str; 4] = ["--disk", "overlays", "--count", "2"];

/// The hosts and the domain, which has not been attached yet.
struct Hosts {
    here: PrivateLibvirt,
    there: PrivateLibvirt,
    labs: [Lab; 2],
    images: tempfile::TempDir,
}

impl Hosts {
    fn new() -> Self {
        let here = PrivateLibvirt::start();
        let there = here.start_second();
        // libvirt's user must be able to enter it.
        let images = tempfile::tempdir().unwrap();
        fs::set_permissions(images.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let labs = [Lab::without_root(), Lab::without_root()];
        for (lab, libvirt) in labs.iter().zip([&here, &there]) {
            lab.allow_directory(images.path());
            lab.write_ssh(&format!("{} ", libvirt.command_prefix()));
        }
        Self { here, there, labs, images }
    }

    /// Boots the domain on the first host, and attaches it.
    fn boot(&self) -> Pair<'_> {
        self.boot_with(Firmware::Bios)
    }

    /// With UEFI, the domain has a TPM as well.
    fn boot_with(&self, firmware: Firmware) -> Pair<'_> {
        self.here.enter();
        let mut devices = make_disks(self.images.path());
        if firmware == Firmware::Uefi {
            devices += TPM;
        }
        let domain = self.here.boot(&DomainOptions { devices: &devices, firmware, ..DomainOptions::new("moving") });
        define(&self.here, &domain);
        let port = domain.address.port();
        let side = |libvirt, lab| Side { libvirt, lab, name: domain.name.clone(), port };
        let [lab_here, lab_there] = &self.labs;
        let xml = self.here.virsh(&["dumpxml", &domain.name]);
        self.labs.iter().for_each(|lab| lab.allow_arguments_of(&xml));
        let (here, there) = (side(&self.here, lab_here), side(&self.there, lab_there));
        let store = lab_here.path("store");
        lab_here.rekindle(["store", "init", store.to_str().unwrap()]).ok();
        here.rekindle(&["attach", "dom", "--libvirt", &domain.name, "--connect", URI]).ok();
        Pair { here, there, store, images: self.images.path(), _domain: domain }
    }
}

/// One of the hosts.
struct Side<'a> {
    libvirt: &'a PrivateLibvirt,
    lab: &'a Lab,
    /// libvirt's name of the domain.
    name: String,
    port: u16,
}

impl Side<'_> {
    fn rekindle(&self, arguments: &[&str]) -> CommandResult {
        self.libvirt.enter();
        self.lab.rekindle(arguments)
    }

    fn virsh(&self, command: &str, arguments: &[&str]) -> Result<String, String> {
        self.libvirt.enter();
        let words = [&[command, self.name.as_str()], arguments].concat();
        self.libvirt.try_virsh(&words)
    }

    /// Returns libvirt's name of the domain's state.
    fn state(&self) -> String {
        self.virsh("domstate", &[]).unwrap_or_else(|_| "unknown".into())
    }

    /// Returns the guest as it is reached from this host.
    fn guest(&self) -> Guest<'_> {
        self.libvirt.enter();
        self.lab.vm("dom").net(Net::User(self.port)).guest()
    }

    fn status(&self) -> String {
        self.guest().status()
    }

    fn has_no_vm(&self) -> bool {
        self.rekindle(&["--json", "ls"]).ok().json().as_array().is_none_or(Vec::is_empty)
    }

    fn restore(&self, store: &Path) -> CommandResult {
        let store = store.to_str().unwrap();
        self.rekindle(&["restore", "dom", "--into-libvirt", "--preview", "--connect", URI, "--store", store])
    }

    /// Ends the guest as a crash does.
    fn kill_qemu(&self) {
        self.virsh("destroy", &[]).unwrap();
    }
}

struct Pair<'a> {
    here: Side<'a>,
    there: Side<'a>,
    store: PathBuf,
    images: &'a Path,
    _domain: Domain<'a>,
}

impl Pair<'_> {
    fn command(&self, from: &Side<'_>, to: &Side<'_>, arguments: &[&str]) -> Command {
        from.libvirt.enter();
        let mut command = from.lab.command(["--json", "move", "dom", "--to", "b", "--rekindle"]);
        command.arg(env!("CARGO_BIN_EXE_rekindle")).arg("--ssh").arg(to.lab.path("ssh"));
        command.arg("--store").arg(&self.store).args(arguments).env_remove("FAR_FAULT");
        command
    }

    fn run(&self, from: &Side<'_>, to: &Side<'_>) -> Value {
        let done = from.lab.finish(self.command(from, to, &["--preview"])).ok();
        serde_json::from_str(done.stdout.lines().last().unwrap()).unwrap()
    }

    fn protect(&self, side: &Side<'_>) {
        side.libvirt.enter();
        protect(side.lab, "dom", &self.store, &OVERLAYS);
    }

    fn overlays(&self) -> Vec<PathBuf> {
        let directories = ["vda", "vdb"].map(|target| self.images.join(format!("{target}.image.rekindle")));
        directories.iter().filter(|path| path.exists()).flat_map(|path| entries(path)).collect()
    }

    /// Asserts that the guest runs on `side` only, as it was: its boot, its memory, its disks.
    #[track_caller]
    fn assert_only_on(&self, side: &Side<'_>, boot: &str, blocks: &[String; 2], context: &str) {
        let other = if std::ptr::eq(side, &self.here) { &self.there } else { &self.here };
        assert_eq!(side.state(), "running", "{context}");
        // A receiver that was not the first to claim the guest, and a libvirt whose QEMU was killed, need a moment.
        wait_for(&format!("the end on the other host: {context}"), DEADLINE, || {
            let is_off = ["shut off", "unknown"].contains(&other.state().as_str());
            (is_off && other.has_no_vm()).then_some(())
        });
        let guest = side.guest();
        wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
        assert_eq!(guest.boot_id(), boot, "{context}");
        guest.verify();
        assert_both_agree(&guest, blocks, context);
    }
}

#[test]
fn a_domain_moves_to_another_libvirt_and_back() {
    let hosts = Hosts::new();
    let pair = hosts.boot();
    let (here, there) = (&pair.here, &pair.there);
    let guest = here.guest();
    let boot = guest.boot_id();
    guest.touch("24M");
    write_both(&guest, 1);
    let mut blocks = read_both(&guest);
    let planned = here.lab.finish(pair.command(here, there, &["--preview", "--dry-run"])).ok().json();
    assert_eq!(planned["vms"][0]["would"], "move its guest to b", "{planned}");
    assert_eq!((here.state().as_str(), there.state().as_str()), ("running", "unknown"));
    assert!(pair.overlays().is_empty() && there.has_no_vm());

    here.libvirt.enter();
    let arguments = ["--disk", "overlays", "--every", "200ms"];
    let mut protector = Protector::start(&guest, here.lab, &pair.store, &arguments);
    protector.next_checkpoint();
    let moved = pair.run(here, there);
    assert!(moved["protector"].is_u64(), "{moved}");
    assert!(protector.child.wait().unwrap().success(), "the protector failed");
    assert_eq!((&moved["name"], &moved["host"]), (&"dom".into(), &"b".into()));
    assert!(moved["stopped_us"].as_u64().unwrap() > 0, "{moved}");
    pair.assert_only_on(there, &boot, &blocks, "moved");
    // Its definition stays, and names a discarded overlay.
    assert_eq!(here.state(), "shut off");
    here.virsh("start", &[]).expect_err("the domain runs on the other host");
    assert!(
        there
            .virsh("dominfo", &[])
            .unwrap()
            .lines()
            .any(|line| line.starts_with("Persistent") && line.ends_with("yes"))
    );

    write_both(&there.guest(), 2);
    pair.protect(there);
    write_both(&there.guest(), 3);
    blocks = read_both(&there.guest());
    pair.run(there, here);
    pair.assert_only_on(here, &boot, &blocks, "moved back");
    there.virsh("start", &[]).expect_err("the domain runs on the first host");

    // Without overlays, the other definition names files that do not exist any more.
    write_both(&here.guest(), 4);
    blocks = read_both(&here.guest());
    here.rekindle(&["detach", "dom"]).ok();
    assert!(pair.overlays().is_empty());
    there.virsh("start", &[]).expect_err("the domain runs on the first host");
    assert_both_agree(&here.guest(), &blocks, "on its images");
}

#[test]
fn a_domain_with_uefi_and_a_tpm_moves_to_a_host_that_has_neither_its_variables_nor_its_tpm() {
    let hosts = Hosts::new();
    let pair = hosts.boot_with(Firmware::Uefi);
    let (here, there) = (&pair.here, &pair.there);
    let guest = here.guest();
    let boot = guest.boot_id();
    guest.touch("8M");
    write_both(&guest, 1);
    let blocks = read_both(&guest);
    guest.ask("efi-variable moved");
    let ask = |command: &str| guest.ask(command);
    let tpm = Tpm(&ask);
    let measured = tpm.fill();
    pair.run(here, there);
    pair.assert_only_on(there, &boot, &blocks, "moved");
    // The guest is reached from the host that this thread is in.
    assert_eq!(guest.ask("efi-variable"), "moved");
    assert_eq!((tpm.variable(), tpm.register()), (1, measured));
}

#[test]
fn what_another_host_does_not_have_for_a_domain_is_reported_before_anything_stops() {
    let hosts = Hosts::new();
    let pair = hosts.boot();
    let (here, there) = (&pair.here, &pair.there);
    let guest = here.guest();
    let boot = guest.boot_id();
    guest.touch("8M");
    write_both(&guest, 1);
    let blocks = read_both(&guest);
    let rejects = |arguments: &[&str], words: &[&str]| {
        here.lab.finish(pair.command(here, there, arguments)).status(1).prints(words);
        assert!(pair.overlays().is_empty());
        pair.assert_only_on(here, &boot, &blocks, &words.join(" "));
    };
    rejects(&[], &["domain of libvirt", "--preview"]);
    rejects(&["--preview", "--definition", "/vm.toml"], &["without --definition"]);
    rejects(&["--preview", "--connect", "test:///nowhere"], &["b cannot take dom", "only qemu:///system"]);
    // The other host does not have the images.
    let script = fs::read_to_string(there.lab.path("ssh")).unwrap();
    let hidden = script.replace(
        "sh -c \"$*\"",
        &format!("unshare -m sh -c 'mount -t tmpfs none {:?} && exec sh -c \"$0\"' \"$*\"", pair.images),
    );
    assert_ne!(hidden, script);
    fs::write(there.lab.path("ssh"), hidden).unwrap();
    rejects(&["--preview"], &["b cannot take dom", "does not have", "vda.image", "vdb.image"]);
    // Its QEMU does not know the machine, or its processors have other features. The announcement passes a pipe that
    // alters it.
    for (altered, words) in [
        (
            "s/pc-i440fx-[0-9.]*/pc-i440fx-99.0/g",
            ["b cannot take dom", "does not know the machine type pc-i440fx-99.0"],
        ),
        (
            "s/\"CPUID 0x1 ECX\":[0-9]*/\"CPUID 0x1 ECX\":1/",
            ["b cannot take dom", "processors like those that the guest sees"],
        ),
    ] {
        let piped = script.replace("\nREKINDLE", &format!("\nsed -u -e '{altered}' | REKINDLE"));
        fs::write(there.lab.path("ssh"), piped).unwrap();
        rejects(&["--preview"], &words);
    }
    fs::write(there.lab.path("ssh"), &script).unwrap();
    // Its libvirt does not run.
    there.libvirt.enter();
    there.libvirt.stop_daemon();
    rejects(&["--preview"], &["b cannot take dom", "libvirt"]);
}

/// The required result of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The guest continues on the source host without a recovery. `recover` must remove the remains on the destination host.
    BackAfterCleanup,
    /// Rekindle was killed; `recover` on the source host resumes the guest on this host.
    RecoveredOnSource,
    /// Rekindle was killed; after `recover` the guest runs on one of the two hosts.
    RecoveredOnEither,
    /// The guest runs on the destination host, and there is nothing to recover.
    Moved,
    /// The source QEMU died before the last checkpoint was complete: the guest continues from the one before.
    FromEarlierCheckpoint,
    /// The destination host owned the guest and lost it: it is restored from its last checkpoint.
    OnlyInStore,
    /// The destination host's Rekindle was killed when the guest might have run: `recover` there finds that it runs.
    RecoveredByDestination,
}

use Outcome::{
    BackAfterCleanup, FromEarlierCheckpoint, Moved, OnlyInStore, RecoveredByDestination, RecoveredOnEither,
    RecoveredOnSource,
};

/// Fault point, action, and required result.
const SOURCE_FAULTS: &[(&str, &str, Outcome)] = &[
    ("move.prepare.journalled", "kill", RecoveredOnSource),
    ("move.prepare.prepared", "kill", RecoveredOnSource),
    ("move.prepare.prepared", "kill-old", FromEarlierCheckpoint),
    ("move.suspend.journalled", "kill", RecoveredOnSource),
    ("move.suspend.journalled", "kill-old", FromEarlierCheckpoint),
    ("move.suspend.read", "kill", RecoveredOnSource),
    ("move.suspend.read", "kill-old", FromEarlierCheckpoint),
    ("move.suspend.committed", "kill", RecoveredOnSource),
    // From here on the guest's state is complete outside of QEMU.
    ("move.suspend.committed", "kill-old", Moved),
    ("move.suspend.let-go", "kill", RecoveredOnSource),
    ("move.suspend.let-go", "kill-old", Moved),
    ("move.resume.journalled", "kill", RecoveredOnSource),
    ("move.resume.journalled", "kill-old", Moved),
    ("move.resume.told", "kill", RecoveredOnEither),
    ("move.resume.told", "kill-old", Moved),
    ("move.settle.running", "kill", RecoveredOnEither),
    ("move.settle.running", "kill-old", Moved),
    ("move.settle.journalled", "kill", RecoveredOnEither),
];

const DESTINATION_FAULTS: &[(&str, &str, Outcome)] = &[
    ("libvirt-restore.prepare.journalled", "kill", BackAfterCleanup),
    ("libvirt-restore.prepare.overlays", "kill", BackAfterCleanup),
    // It has claimed the store, and reports that the guest has not run.
    ("libvirt-restore.prepare.owned", "kill-daemon", BackAfterCleanup),
    ("libvirt-restore.prepare.owned", "kill", OnlyInStore),
    ("libvirt-restore.renew.registered", "kill", OnlyInStore),
    ("libvirt-restore.renew.loaded", "kill", OnlyInStore),
    ("overlay.restore.recorded", "kill", OnlyInStore),
    ("overlay.restore.recorded", "kill-new", OnlyInStore),
    ("libvirt-restore.renew.attached", "kill", OnlyInStore),
    ("libvirt-restore.resume.journalled", "kill", RecoveredByDestination),
    ("libvirt-restore.resume.resumed", "kill", RecoveredByDestination),
    ("libvirt-restore.settle.handed-over", "kill", RecoveredByDestination),
    ("libvirt-restore.settle.defined", "kill", RecoveredByDestination),
];

#[test]
fn every_fault_of_a_domain_s_move_on_the_source_host() {
    walk(SOURCE_FAULTS, "REKINDLE_FAULT");
}

#[test]
fn every_fault_of_a_domain_s_move_on_the_destination_host() {
    walk(DESTINATION_FAULTS, "FAR_FAULT");
}

fn walk(table: &[(&str, &str, Outcome)], variable: &str) {
    let hosts = Hosts::new();
    let pair = hosts.boot();
    let guest = pair.here.guest();
    guest.touch("8M");
    let boot = guest.boot_id();
    for (seed, (point, action, outcome)) in table.iter().enumerate() {
        let fault = format!("{point}:{action}");
        eprintln!("==== {fault}, expected {outcome:?}");
        case(&pair, variable, &fault, *outcome, &boot, seed as u64);
    }
}

fn case(pair: &Pair<'_>, variable: &str, fault: &str, outcome: Outcome, boot: &str, seed: u64) {
    let (here, there) = (&pair.here, &pair.there);
    let guest = here.guest();
    write_both(&guest, seed);
    let blocks = read_both(&guest);
    let mut command = pair.command(here, there, &["--preview"]);
    command.env(variable, fault);
    let result = here.lab.finish(command);
    let assert_on = |side: &Side<'_>| pair.assert_only_on(side, boot, &blocks, fault);
    match outcome {
        BackAfterCleanup => {
            result.status(1).prints(&["has not taken dom", "resumed here"]);
            there.libvirt.enter();
            if there.libvirt.daemon().is_none_or(|daemon| !daemon.is_alive()) {
                there.libvirt.start_daemon();
            }
            assert_eq!(here.state(), "running", "{fault}");
            // What was left there is removed although the guest has continued, and nothing else is.
            pair.protect(here);
            there.rekindle(&["recover", "dom"]).ok();
            assert_on(here);
            pair.protect(here);
            here.kill_qemu();
            here.restore(&pair.store).ok();
            assert_on(here);
        }
        RecoveredOnSource => {
            result.killed();
            assert_eq!(here.status(), "needs-recovery", "{fault}");
            here.rekindle(&["recover", "dom"]).ok().prints(&["undone"]);
            assert_on(here);
        }
        RecoveredOnEither => {
            result.killed();
            here.rekindle(&["recover", "dom"]).ok();
            assert_on(if here.state() == "running" { here } else { there });
        }
        Moved => {
            result.ok();
            assert_on(there);
        }
        FromEarlierCheckpoint => {
            assert_ne!(result.code, Some(0), "{result}");
            wait_for("libvirt to notice", DEADLINE, || (here.state() == "shut off").then_some(()));
            assert_eq!(there.state(), "unknown");
            here.rekindle(&["recover", "dom"]);
            here.restore(&pair.store).ok();
            // Written before the first checkpoint of the move.
            assert_on(here);
        }
        OnlyInStore => {
            result.status(3).prints(&["has taken", "rekindle restore"]);
            assert_eq!(here.state(), "shut off", "{fault}");
            here.virsh("start", &[]).expect_err("another host owns the guest");
            there.rekindle(&["recover", "dom"]).ok();
            assert!(there.has_no_vm(), "{fault}");
            here.restore(&pair.store).ok();
            assert_on(here);
        }
        RecoveredByDestination => {
            result.status(3).prints(&["has taken"]);
            there.rekindle(&["recover", "dom"]).ok();
            assert_on(there);
        }
    }
    // The next case needs the guest on the source host.
    if there.state() == "running" {
        pair.run(there, here);
        assert_on(here);
        // A host that has never had the domain.
        there.virsh("undefine", &[]).unwrap();
    }
}
