//! A host whose real-time clock jumps, and an object store with latency: neither costs a guest, a page or a commit.

use crate::common::protector::{Protector, crash, restore_with, store, wait_filled};
use crate::common::served::{READ, digest, image, read, section, status};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use rekindle_testing::shifted_clock::{ShiftedClock, YEAR_S};
use rekindle_testing::slow_proxy::SlowProxy;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where the clock jumps, in seconds from the time of the machine.
const JUMPS: [i64; 4] = [YEAR_S, -YEAR_S, YEAR_S, 0];

/// A lab whose commands have a clock that jumps, and other variables.
struct Host<'a> {
    lab: &'a Lab,
    variables: Vec<(&'static str, String)>,
}

impl Host<'_> {
    fn environment(&self) -> Vec<(&str, &str)> {
        self.variables.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// Runs a command, which must succeed. Returns its output.
    #[track_caller]
    fn run(&self, words: &[&str]) -> String {
        let mut command = self.lab.command(words);
        command.envs(self.environment());
        self.lab.finish(command).ok().stdout
    }
}

/// Waits for the next `count` events, each of which must be a checkpoint, with the number after the one before.
#[track_caller]
fn expect_checkpoints(protector: &mut Protector, newest: &mut u64, count: u64) {
    for _ in 0..count {
        let mut line = String::new();
        protector.lines.read_line(&mut line).unwrap();
        let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(
            (event["event"].as_str(), event["number"].as_u64()),
            (Some("checkpoint"), Some(*newest + 1)),
            "{line}"
        );
        *newest += 1;
    }
}

/// Waits until the protector reports why the store cannot be written, with these words, and nothing of an answer of a server.
#[track_caller]
fn wait_store_away(protector: &mut Protector, words: &[&str]) {
    loop {
        let error = protector.wait("store-away")["error"].as_str().unwrap().to_owned();
        assert!(!error.contains('<'), "{error}");
        if words.iter().all(|word| error.contains(word)) {
            return;
        }
    }
}

#[test]
fn jumps_of_the_hosts_clock_cost_no_checkpoint_no_cache_and_no_guest() {
    let lab = Lab::new();
    let clock = ShiftedClock::new();
    let host = Host { lab: &lab, variables: clock.environment().into() };
    let image = image(&lab, "disk.raw");
    let vm = lab.vm("leap").section(&section(&image, "attic_keep = \"1h\"\n"));
    let (definition, guest) = (vm.write(), vm.guest());
    host.run(&["run", definition.to_str().unwrap()]);
    guest.wait_ready();
    guest.touch("16M");
    let store = store(&lab, "leap");
    let protect = ["--every", "100ms", "--keep", "2"];
    let mut protector = Protector::start_with(&guest, &lab, &store, &protect, &host.environment());
    let mut newest = protector.wait("checkpoint")["number"].as_u64().unwrap();
    for offset in JUMPS {
        clock.set(offset);
        expect_checkpoints(&mut protector, &mut newest, 3);
        for words in [&["status"][..], &["ls"], &["show", "leap"], &["store", "ls", store.to_str().unwrap()]] {
            host.run(words);
        }
        guest.verify();
    }
    protector.end();
    let listing: Value = serde_json::from_str(&host.run(&["--json", "store", "ls", store.to_str().unwrap()])).unwrap();
    let kept: Vec<_> = listing["checkpoints"].as_array().unwrap().iter().map(|kept| kept["number"].as_u64()).collect();
    let newest = kept.last().copied().flatten().unwrap();
    assert_eq!(kept, [Some(newest - 1), Some(newest)]);

    // A retained cache does not expire by the clock of the host.
    assert_eq!(read(&guest, 0, READ), digest(&image, 0, READ));
    let report: Value = serde_json::from_str(&host.run(&["--json", "reboot", "leap"])).unwrap();
    assert_eq!(report["how"], "warm-cache");
    guest.wait_ready();
    clock.set(YEAR_S);
    assert_eq!(read(&guest, 0, READ), digest(&image, 0, READ));
    let now = status(&guest);
    let counts = now.retained.map(|(_, counts)| counts).or(now.emptied).expect("a retained cache");
    assert!(counts.served > READ / 2, "{counts:?}");

    // The newest checkpoint is the one of the newest boot, although a clock that was ahead has written those before.
    guest.touch("16M");
    let boot = guest.boot_id();
    clock.set(-YEAR_S);
    let mut protector =
        Protector::start_with(&guest, &lab, &store, &[&protect[..], &["--count", "2"]].concat(), &host.environment());
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    for offset in [-YEAR_S, YEAR_S] {
        clock.set(offset);
        let restored = restore_with(&guest, &store, &[], &host.environment());
        assert_eq!(restored["checkpoint"], newest + 2);
        assert_eq!(guest.boot_id(), boot);
        wait_filled(&guest);
        guest.verify();
        crash(&guest);
    }
}

/// Waits until the guest has ticked again.
#[track_caller]
fn assert_runs(guest: &Guest<'_>) {
    let tick = guest.tick();
    wait_for("the guest to run", DEADLINE, || (guest.tick() > tick).then_some(()));
}

#[test]
fn a_guest_outlives_an_object_store_that_rejects_its_hosts_clock_or_answers_late() {
    const LATENCY: Duration = Duration::from_secs(2);
    let server = ObjectStoreServer::start();
    let proxy = SlowProxy::start(server.port());
    let (lab, clock) = (Lab::new(), ShiftedClock::new());
    let mut variables = server.environment_over(proxy.port());
    variables.extend(clock.environment());
    let host = Host { lab: &lab, variables };
    let guest = lab.vm("web").memory("96M").boot(&[]);
    let boot = guest.boot_id();
    let store = PathBuf::from(format!("s3://{BUCKET}/web"));
    let url = store.to_str().unwrap();
    host.run(&["store", "init", url]);
    let mut protector = Protector::start_with(&guest, &lab, &store, &["--every", "100ms"], &host.environment());
    protector.wait("checkpoint");

    // The server rejects requests whose time differs by more than 15 minutes from its own.
    for offset in [YEAR_S, -YEAR_S] {
        clock.set(offset);
        wait_store_away(&mut protector, &["clock differs from this machine's", "set the clock"]);
        let mut listing = lab.command(["store", "ls", url]);
        listing.envs(host.environment());
        lab.finish(listing).status(1).prints(&["clock differs from this machine's", "set the clock"]);
        assert_runs(&guest);
        clock.set(0);
        protector.wait("store-back");
        protector.wait("checkpoint");
    }

    // No answer arrives while a checkpoint is taken and committed: the guest runs.
    proxy.hold();
    guest.touch("16M");
    proxy.wait_held();
    assert_runs(&guest);
    assert!(proxy.has_held());
    proxy.set_latency(LATENCY);
    let delayed = proxy.delayed();
    proxy.release();
    protector.wait("checkpoint");
    // This one was started later, with latency for each of its requests.
    let committed = protector.wait("checkpoint")["number"].as_u64().unwrap();
    assert!(proxy.delayed() > delayed);
    proxy.set_latency(Duration::ZERO);
    protector.end();
    crash(&guest);

    proxy.set_latency(LATENCY);
    let delayed = proxy.delayed();
    let restored = restore_with(&guest, &store, &[], &host.environment());
    assert!(proxy.delayed() > delayed);
    assert!(restored["checkpoint"].as_u64().unwrap() >= committed, "{restored}");
    // The rest would take minutes on a busy machine.
    proxy.set_latency(LATENCY / 10);
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    wait_filled(&guest);
    guest.verify();
    guest.assert_sound();
}

#[test]
fn the_resource_agent_has_the_same_time_for_an_operation_if_the_clock_jumps_in_it() {
    const TIMEOUT_MS: u64 = 1_000_000;
    let (lab, clock) = (Lab::without_root(), ShiftedClock::new());
    let (program, log, definition) = (lab.path("program"), lab.path("calls"), lab.path("web.toml"));
    fs::write(&definition, "").unwrap();
    for offset in [YEAR_S, -YEAR_S] {
        clock.set(0);
        fs::write(&log, "").unwrap();
        // In place of Rekindle: the clock jumps in each call.
        let text = format!("#!/bin/sh\necho \"$@\" >>'{}'\n{}\n", log.display(), clock.command_to_set(offset));
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let mut agent = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/ocf/rekindle"));
        agent
            .arg("start")
            .envs(clock.environment())
            .env("OCF_ROOT", "/usr/lib/ocf")
            .env("OCF_RESOURCE_INSTANCE", "web");
        agent.env("OCF_RESKEY_store", lab.path("store")).env("OCF_RESKEY_definition", &definition);
        agent.env("OCF_RESKEY_binary", &program).env("OCF_RESKEY_run_dir", lab.run_root());
        agent.env("OCF_RESKEY_require_fencing", "false").env("OCF_RESKEY_CRM_meta_timeout", TIMEOUT_MS.to_string());
        let output = agent.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let calls = fs::read_to_string(&log).unwrap();
        // The time that each call may take: 70 % of what is left.
        let words: Vec<_> = calls.split_whitespace().collect();
        let limits = words.windows(2).filter(|pair| pair[0] == "--within");
        let limits: Vec<u64> = limits.map(|pair| pair[1].strip_suffix("ms").unwrap().parse().unwrap()).collect();
        assert_eq!(limits.len(), 2, "{calls}");
        assert!(limits.iter().all(|limit| (TIMEOUT_MS / 2..=TIMEOUT_MS * 7 / 10).contains(limit)), "{offset}: {calls}");
    }
}
