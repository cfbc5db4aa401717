//! `rekindle replace-qemu` with running guests: the guests keep their memory and connections, and the report is complete.

use crate::common::{DEADLINE, Guest, Lab, Net, Watch, assert_ticks_once, major, qemu_new, qemu_old, wait_for};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Asserts that a report with a memory comparison covers all of the memory and shows no change.
#[track_caller]
fn assert_unchanged(report: &Value, blocks: &[&str]) {
    assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
    let memory = &report["memory"];
    assert_eq!(memory["not_compared"].as_array().map(Vec::len), Some(0), "{report:#}");
    let compared = memory["blocks_changed"].as_object().unwrap();
    assert!(compared.values().all(|changed| changed == false), "{report:#}");
    for block in blocks {
        assert!(compared.keys().any(|id| id.contains(block)), "{block} was not compared: {report:#}");
    }
}

#[test]
fn warm_keeps_memory_connections_console_and_video() {
    let lab = Lab::new();
    let disk = lab.path("disk.raw");
    std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let vm = lab.vm("warm").section("[devices]\nvga = true").section(&format!("[[disk]]\npath = {disk:?}"));
    let guest = vm.boot(&[]);
    guest.touch("24M");
    let (boot, tick) = (guest.boot_id(), guest.tick());
    let mut echo = guest.connect(7).unwrap();
    echo.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut echoes = |text: &[u8]| {
        let mut back = vec![0; text.len()];
        echo.write_all(text).unwrap();
        echo.read_exact(&mut back).unwrap();
        assert_eq!(back, text);
    };
    echoes(b"before");
    let mut console = Console::open(&guest);
    console.wait_tick();

    let report = guest.warm(&["--verify-memory"]);
    assert_unchanged(&report, &["pc.bios", "vga.vram", "acpi/tables"]);
    echoes(b"after");
    console.wait_tick();
    assert_eq!(guest.boot_id(), boot);
    assert!(guest.tick() > tick);
    guest.verify();
    assert!(guest.ask("uptime").parse::<f64>().unwrap() > 0.0);
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));
    let steps = report["steps"].as_array().unwrap();
    for phase in ["prepare", "suspend", "renew", "resume", "settle"] {
        assert!(steps.iter().any(|step| step["phase"] == phase), "no {phase} in {report:#}");
    }
    assert_eq!(
        report["resume_host_us"].as_u64().unwrap() - report["stop_host_us"].as_u64().unwrap(),
        report["stopped_us"]
    );
    assert_ne!(report["from"]["pid"], report["to"]["pid"]);

    // Without the comparison the load overlaps with the decision, which is another code path.
    let report = guest.warm(&[]);
    assert!(report.get("memory").is_none(), "{report:#}");
    echoes(b"once more");
    guest.verify();
    guest.assert_sound();
    console.detach();
    let drawn = guest.rekindle(&["show", "--timeline"]).ok();
    drawn.prints(&["replace-qemu --how warm of warm", "suspend", "settle", "█"]);
    let entries = guest.rekindle(&["--json", "show", "--timeline"]).ok().json();
    assert!(entries.as_array().unwrap().iter().all(|entry| entry["vm"] == "warm"), "{entries:#}");
    let lines = guest.lab.rekindle(["replace-qemu", "warm"]).ok();
    lines.prints(&["warm: stopped for", &format!("QEMU {}.", major(qemu_new())), "->"]);
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

/// A running `rekindle console`, with its input and output.
struct Console {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Console {
    fn open(guest: &Guest<'_>) -> Self {
        let mut child = guest.lab.command(["console", &guest.name]).stdin(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits for a complete tick line that is written after the call.
    fn wait_tick(&mut self) {
        let mut lines = 0;
        while lines < 2 {
            let mut line = Vec::new();
            let n = self.lines.read_until(b'\n', &mut line).unwrap();
            assert!(n > 0, "the console has ended");
            lines += usize::from(line.starts_with(b"tick "));
        }
    }

    fn detach(mut self) {
        self.child.stdin.take().unwrap().write_all(&[0x1d]).unwrap();
        let status = wait_for("the console to end", DEADLINE, || self.child.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }
}

#[test]
fn an_upgrade_to_a_new_qemu_can_be_rolled_back() {
    let lab = Lab::new();
    let guest = lab.vm("upgrade").boot(&["--qemu", qemu_old().to_str().unwrap()]);
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["hardware"]["machine"], "pc-q35-7.2", "the machine type is pinned at the first start");
    guest.touch("24M");
    let boot = guest.boot_id();
    let back = guest.reboot("warm", &["--rollback"]).status(1);
    back.prints(&["upgrade", "it has run no other QEMU binary"]);
    guest.assert_sound();

    let new = qemu_new().to_str().unwrap();
    for (arguments, from, to) in [
        (vec!["--qemu", new, "--verify-memory"], qemu_old(), qemu_new()),
        (vec!["--rollback", "--verify-memory"], qemu_new(), qemu_old()),
        (vec!["--rollback"], qemu_old(), qemu_new()),
        (vec!["--rollback"], qemu_new(), qemu_old()),
    ] {
        let report = guest.warm(&arguments);
        assert_eq!(report["from"]["version"]["major"], major(from), "{report:#}");
        assert_eq!(report["to"]["version"]["major"], major(to), "{report:#}");
        if arguments.contains(&"--verify-memory") {
            assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
        }
        guest.verify();
        guest.assert_sound();
    }
    // The old QEMU also saves its guest's state to disk and loads it.
    guest.reboot("saved", &[]).ok();
    guest.verify();
    guest.reboot("saved", &["--qemu", new]).ok();
    guest.verify();
    guest.assert_sound();
    assert_eq!(guest.boot_id(), boot);
    assert_ticks_once(&guest.file("console.log"));
}

#[test]
fn saved_keeps_memory_and_cold_does_not() {
    let lab = Lab::new();
    let guest = lab.vm("ways").boot(&[]);
    guest.touch("24M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let mut echo = guest.connect(7).unwrap();
    let report = &guest.reboot("saved", &[]).ok().json()["vms"][0];
    assert_eq!(report["from"]["pid"], pid);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    echo.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    echo.write_all(b"still there").unwrap();
    echo.read_exact(&mut [0; 11]).unwrap();
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));

    let report = guest.reboot("cold", &[]).ok().json();
    let steps: Vec<_> = report["vms"][0]["steps"].as_array().unwrap().iter().map(|step| step["step"].clone()).collect();
    assert!(steps.contains(&"shut down by ACPI".into()), "{report:#}");
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    guest.touch("24M");
    guest.warm(&[]);
    guest.verify();
    guest.rekindle(&["stop"]).ok().prints(&["shut down by ACPI"]);
    lab.assert_empty();
}

#[test]
fn all_are_rebooted_together_and_one_that_fails_does_not_stop_the_others() {
    let lab = Lab::new();
    lab.rekindle(["replace-qemu", "--all"]).status(2).prints(&["no VM runs"]);
    let names = ["one", "two", "three"];
    let started: Vec<_> = names.iter().map(|name| lab.vm(name).memory("112M").start(&[])).collect();
    started.iter().for_each(Guest::wait_ready);
    let before: Vec<_> = started.iter().map(|guest| (guest.boot_id(), guest.touch("16M"))).collect();
    let watch = Watch::start(&lab.run_root());
    let report = lab.rekindle(["--json", "replace-qemu", "--all"]).ok().json();
    watch.end();
    let vms = report["vms"].as_array().unwrap();
    assert_eq!(vms.len(), 3, "{report:#}");
    let time = |vm: &Value, key: &str| vm[key].as_u64().unwrap();
    let first = vms.iter().map(|vm| time(vm, "stop_host_us")).min().unwrap();
    let last = vms.iter().map(|vm| time(vm, "resume_host_us")).max().unwrap();
    assert_eq!(report["first_stop_to_last_resume_us"], last - first);
    // No guest was stopped before all had been prepared.
    for vm in vms {
        let steps = vm["steps"].as_array().unwrap();
        let prepared = steps.iter().filter(|step| step["phase"] == "prepare");
        let prepared = prepared.map(|step| time(step, "start_host_us") + time(step, "us")).max().unwrap();
        assert!(prepared <= first + 2000, "prepared at {prepared}, the first stop was at {first}: {report:#}");
    }
    for (guest, (boot, ())) in started.iter().zip(&before) {
        guest.verify();
        assert_eq!(&guest.boot_id(), boot);
        guest.assert_sound();
    }
    // One of the VMs cannot be handed over: it fails, and the others are rebooted.
    let _ = started[1].only_qemu().process.kill();
    let mixed = lab.rekindle(["--json", "replace-qemu", "one", "two", "three"]).status(1).json();
    let outcomes: Vec<_> = mixed["vms"].as_array().unwrap().iter().map(|vm| vm["outcome"].clone()).collect();
    assert_eq!(outcomes, ["done", "failed", "done"], "{mixed:#}");
    started[0].verify();
    started[2].verify();
}

#[test]
fn a_paused_guest_stays_paused() {
    let lab = Lab::new();
    let guest = lab.vm("paused").boot(&[]);
    guest.touch("8M");
    let qmp = |command: &str| {
        let directory = guest.qemus()[0].directory.clone();
        let mut qmp = rekindle_qemu::qmp::Qmp::connect(&directory.join("watch.sock"), Duration::from_secs(5)).unwrap();
        qmp.execute::<Value>(command, ()).unwrap();
    };
    qmp("stop");
    assert!(guest.status().contains("paused"), "{}", guest.status());
    for how in ["warm", "saved"] {
        guest.reboot(how, &[]).ok();
        assert!(guest.status().contains("paused"), "after {how}: {}", guest.status());
    }
    qmp("cont");
    guest.verify();
    guest.assert_sound();
}

#[test]
fn a_user_network_keeps_its_forwarded_ports() {
    let lab = Lab::without_root();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let guest = lab.vm("ports").net(Net::User(port)).boot(&[]);
    guest.touch("8M");
    for how in ["warm", "saved", "cold"] {
        guest.reboot(how, &[]).ok();
        guest.wait_ready();
        if how != "cold" {
            guest.verify();
        }
        guest.assert_sound();
    }
}

#[test]
fn twenty_reboots_in_a_row_lose_no_request() {
    let lab = Lab::new();
    let guest = lab.vm("twenty").boot(&[]);
    guest.touch("16M");
    guest.ask("dirty 4 8 random");
    let boot = guest.boot_id();
    let probe = |url: String, every: &str| {
        let arguments = ["--json", "probe", &url, "--every", every, "--netns", &lab.namespace, "--timeout", "30s"];
        lab.command(arguments).spawn().unwrap()
    };
    let probes = [
        (probe(format!("echo://{}:7", guest.ip()), "10ms"), "echo"),
        (probe(format!("http://{}/bytes/2000", guest.ip()), "20ms"), "http"),
    ];
    for _ in 0..20 {
        guest.warm(&[]);
    }
    for (child, what) in probes {
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let seen = lab.wait(child, what.into()).ok().json();
        // Require more answers than there were reboots.
        assert!(seen["answered"].as_u64().unwrap() > 20, "{what}: {seen:#}");
        let failed: u64 = seen["failed"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
        assert_eq!(failed, 0, "{what}: {}", seen["first_failure"]);
        assert_eq!(seen["connections_lost"], 0, "{what}");
        assert_eq!(seen["connections_opened"], 1, "{what}");
    }
    assert!(guest.ask("dirty 0").parse::<u64>().unwrap() > 0, "the guest wrote nothing during the reboots");
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));
}
