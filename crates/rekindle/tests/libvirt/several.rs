//! Several domains in one command: libvirt's daemon is stopped once for all of them.

use crate::{assert_continues, boot, qemus_of, rekindle, text};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use serde_json::Value;
use std::fs;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Calls `work`, and returns its result with the daemons that ran meanwhile, in their order.
fn watch_daemon<T>(work: impl FnOnce() -> T) -> (T, Vec<u32>) {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut daemons = Vec::new();
            loop {
                let is_last = is_done.load(Ordering::SeqCst);
                let pid = fs::read_to_string("/run/libvirtd.pid").ok().and_then(|text| text.trim().parse::<u32>().ok());
                daemons.extend(pid);
                daemons.dedup();
                if is_last {
                    return daemons;
                }
                // A daemon takes longer to start.
                thread::sleep(Duration::from_millis(2));
            }
        });
        let result = work();
        is_done.store(true, Ordering::SeqCst);
        (result, watcher.join().unwrap())
    })
}

fn replace_all(domains: &[&Domain<'_>], fault: &str) -> Output {
    let mut command = rekindle(&["--json", "replace-qemu"]);
    command.args(domains.iter().map(|domain| &domain.name)).env("REKINDLE_FAULT", fault).output().unwrap()
}

/// Returns the entry of each domain in the output, in the order of `domains`.
fn entries(output: &Output, domains: &[&Domain<'_>]) -> Vec<Value> {
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let entries = report["vms"].as_array().unwrap();
    let entry_of =
        |domain: &&Domain<'_>| entries.iter().find(|entry| entry["name"] == domain.name.as_str()).unwrap().clone();
    domains.iter().map(entry_of).collect()
}

/// Limits the memory of a domain, which prevents a replacement.
fn limit_memory(libvirt: &PrivateLibvirt, domain: &Domain<'_>) {
    libvirt.virsh(&["memtune", &domain.name, "--hard-limit", "2097152", "--live"]);
}

#[test]
fn the_daemon_is_stopped_once_for_all_and_a_rejected_domain_holds_up_no_other() {
    let libvirt = PrivateLibvirt::start();
    let [first, rejected, last] = ["first", "rejected", "last"].map(|name| boot(&libvirt, name));
    limit_memory(&libvirt, &rejected);
    let domains = [&first, &rejected, &last];
    let boot_ids = domains.map(|domain| domain.ask("boot-id"));
    let sources = domains.map(Domain::process);

    let (output, daemons) = watch_daemon(|| replace_all(&domains, ""));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_eq!(daemons.len(), 2, "one stop, one start: {daemons:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let away_us = report["daemon_absences_us"].as_array().unwrap();
    assert_eq!(away_us.len(), 1, "{report}");
    let entries = entries(&output, &domains);
    let outcomes: Vec<_> = entries.iter().map(|entry| entry["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["done", "failed", "done"], "{report}");
    assert!(entries[1]["error"].as_str().unwrap().contains("virsh memtune"), "{report}");
    assert_eq!((&entries[0]["daemon_away_us"], &entries[2]["daemon_away_us"]), (&away_us[0], &away_us[0]));
    assert_eq!(rejected.process(), sources[1]);
    assert!(!sources[0].is_alive() && !sources[2].is_alive());
    for (domain, boot_id) in domains.iter().zip(&boot_ids) {
        assert_eq!((qemus_of(&domain.name), domain.state()), (vec![domain.process()], "running".to_owned()));
        assert_continues(domain, boot_id);
    }
    assert_eq!(fs::read_dir("/run/rekindle").unwrap().filter(is_run_directory).count(), 0);
}

fn is_run_directory(entry: &std::io::Result<fs::DirEntry>) -> bool {
    !entry.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')
}

#[test]
fn a_domain_that_fails_during_the_absence_continues_in_its_source_and_the_others_are_replaced() {
    let libvirt = PrivateLibvirt::start();
    let [first, second] = ["fails", "works"].map(|name| boot(&libvirt, name));
    let domains = [&first, &second];
    let boot_ids = domains.map(|domain| domain.ask("boot-id"));
    let sources = domains.map(Domain::process);
    let fault = format!("replace.suspend.copied:kill-new:{}", first.name);
    let (output, daemons) = watch_daemon(|| replace_all(&domains, &fault));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_eq!(daemons.len(), 2, "{daemons:?}");
    let entries = entries(&output, &domains);
    let found = (entries[0]["left"].as_str(), entries[1]["outcome"].as_str());
    assert_eq!(found, (Some("as-it-was"), Some("done")), "{entries:?}");
    assert_eq!(first.process(), sources[0]);
    assert_ne!(second.process(), sources[1]);
    for (domain, boot_id) in domains.iter().zip(&boot_ids) {
        assert_eq!((qemus_of(&domain.name), domain.state()), (vec![domain.process()], "running".to_owned()));
        assert_continues(domain, boot_id);
    }
}

#[test]
fn all_domains_of_libvirt_are_planned_and_paused_and_attached_ones_are_skipped() {
    let libvirt = PrivateLibvirt::start();
    let output = rekindle(&["replace-qemu", "--all-libvirt"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let [possible, rejected, paused, attached] =
        ["possible", "rejected", "paused", "attached"].map(|name| libvirt.create(&DomainOptions::new(name)));
    limit_memory(&libvirt, &rejected);
    libvirt.virsh(&["suspend", &paused.name]);
    let adopted = rekindle(&["attach", "web", "--libvirt", &attached.name]).output().unwrap();
    assert!(adopted.status.success(), "{}", text(&adopted));
    let processes = [&possible, &rejected, &paused, &attached].map(Domain::process);
    let daemon = libvirt.daemon();

    let output = rekindle(&["replace-qemu", "--all-libvirt", "--dry-run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let lines = text(&output);
    let has_line = |domain: &Domain<'_>, start: &str| lines.contains(&format!("{}: {start}", domain.name));
    assert!(has_line(&possible, "would replace QEMU") && has_line(&rejected, "not possible"), "{lines}");
    assert!(has_line(&paused, "would skip it: libvirt reports it as paused"), "{lines}");
    assert!(has_line(&attached, "would skip it: it is attached as web"), "{lines}");
    assert_eq!(libvirt.daemon(), daemon);

    // What is skipped is no failure.
    libvirt.virsh(&["destroy", &rejected.name]);
    let output = rekindle(&["replace-qemu", "--all-libvirt"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains(&format!("{}: skipped: it is attached as web", attached.name)), "{}", text(&output));
    let now: Vec<Process> = [&possible, &paused, &attached].map(Domain::process).into();
    assert_ne!(now[0], processes[0]);
    assert_eq!(now[1..], processes[2..]);
    let output = rekindle(&["replace-qemu", &attached.name]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("rekindle detach web"), "{}", text(&output));
    assert_eq!(attached.process(), processes[3]);
    let released = rekindle(&["detach", "web"]).output().unwrap();
    assert!(released.status.success(), "{}", text(&released));
}
