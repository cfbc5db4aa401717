//! Prometheus's own tool checks the exposition, the alert rules, and the alerts that these give for invented figures.
//! `scripts/setup` installs it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use rekindle_metrics::catalog::{CATALOG, Kind};
use rekindle_metrics::exposition::{Format, Snapshot, Value};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/prometheus");

/// Runs promtool with this standard input. Fails if it finds a fault, or prints a warning.
fn promtool(arguments: &[&str], input: &str) {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(RULES).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("promtool: {e}; run: scripts/setup"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "promtool {arguments:?}: {}", String::from_utf8_lossy(&text));
}

/// A series of each metric, for two VMs if it has labels.
fn exposition() -> String {
    let mut snapshot = Snapshot::default();
    for metric in CATALOG {
        let value = match metric.kind {
            Kind::Histogram => Value::Histogram { sum: 0.25, count: 5, buckets: vec![(0.001, 2), (0.1, 2)] },
            _ => Value::Count(1),
        };
        for label in ["web", "of \"others\" \\ \n"] {
            snapshot.add(metric, &vec![label; metric.labels.len()], value.clone());
            if metric.labels.is_empty() {
                break;
            }
        }
    }
    snapshot.encode(Format::PrometheusText).unwrap()
}

#[test]
fn the_exposition_has_no_fault() {
    promtool(&["check", "metrics"], &exposition());
}

#[test]
fn the_alert_rules_are_valid_and_fire() {
    assert!(Path::new(RULES).join("rekindle.rules.yml").exists());
    promtool(&["check", "rules", "rekindle.rules.yml"], "");
    promtool(&["test", "rules", "rekindle.rules.test.yml"], "");
}
