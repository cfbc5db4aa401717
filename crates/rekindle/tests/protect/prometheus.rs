//! `rekindle metrics`, scraped by Debian's Prometheus: the queries of the dashboard have answers, and alerts fire.

use crate::common::protector::{Protector, store};
use crate::common::{DEADLINE, Lab, free_port, wait_for};
use rekindle_kernel::spawn::die_with_starter;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

/// The start of queries without an answer in this test: nothing is restored, no QEMU is out of date, and no helper has died.
const EMPTY: &[&str] =
    &["rekindle_fill_missing_bytes", "rekindle_qemu_outdated{", "increase(rekindle_vm_helper_restarts_total"];

/// A Prometheus that scrapes one host each second.
struct Prometheus {
    server: Child,
    address: String,
}

impl Prometheus {
    fn start(lab: &Lab, target: &str) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let config = lab.path("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [\"{PACKAGING}/prometheus/rekindle.rules.yml\"]\n\
             scrape_configs: [{{job_name: rekindle, static_configs: [{{targets: [\"{target}\"]}}]}}]\n"
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", lab.path("tsdb").display()));
        command.arg(format!("--web.listen-address={address}"));
        command.stdout(Stdio::null()).stderr(fs::File::create(lab.path("prometheus.log")).unwrap());
        let server = die_with_starter(&mut command).spawn();
        Self { server: server.unwrap_or_else(|e| panic!("prometheus: {e}; run: scripts/setup")), address }
    }

    /// Returns the series that are the answer to a query. `None`: Prometheus does not answer. Panics if it rejects the query.
    fn query(&self, query: &str) -> Option<Vec<Value>> {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--max-time", "10", "--get", "--data-urlencode", &format!("query={query}")]);
        let output = curl.arg(format!("http://{}/api/v1/query", self.address)).output().unwrap();
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        Some(answer["data"]["result"].as_array().unwrap().clone())
    }

    #[track_caller]
    fn wait_for_series(&self, query: &str) {
        wait_for(query, DEADLINE, || self.query(query).filter(|series| !series.is_empty()));
    }

    /// Returns the names of the alerts that fire, each with its VM.
    fn firing(&self) -> BTreeSet<String> {
        let alerts = self.query("ALERTS{alertstate=\"firing\"}").unwrap_or_default();
        let name = |alert: &Value| {
            let [name, vm] = ["alertname", "vm"].map(|label| alert["metric"][label].as_str().unwrap_or("-"));
            format!("{name} {vm}")
        };
        alerts.iter().map(name).collect()
    }

    fn end(mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

/// Starts `rekindle metrics`. Returns the process, and its address and port.
fn start_exporter(lab: &Lab) -> (Child, String) {
    let mut command = lab.command(["--json", "metrics", "--listen", "127.0.0.1:0"]);
    let mut exporter = die_with_starter(&mut command).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(exporter.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let started: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    let url = started["url"].as_str().unwrap();
    let address = url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).unwrap();
    (exporter, address.to_owned())
}

/// Returns the title and the query of each target of the dashboard's panels, for all hosts and VMs.
fn dashboard_queries() -> Vec<(String, String)> {
    let text = fs::read_to_string(format!("{PACKAGING}/grafana/rekindle.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$instance", ".*").replace("$vm", ".*").replace("$__rate_interval", "10s");
            queries.push((panel["title"].as_str().unwrap().to_owned(), query));
        }
    }
    queries
}

#[test]
fn prometheus_scrapes_the_metrics_the_dashboard_has_values_and_alerts_fire() {
    let lab = Lab::new();
    let web = lab.vm("web").memory("96M").boot(&[]);
    let db = lab.vm("db").memory("96M").boot(&[]);
    web.warm(&[]);
    let mut protector = Protector::start(&web, &lab, &store(&lab, "store"), &["--every", "1s"]);
    protector.next_checkpoint();
    let (mut exporter, target) = start_exporter(&lab);
    let prometheus = Prometheus::start(&lab, &target);

    prometheus.wait_for_series("up{job=\"rekindle\"} == 1");
    prometheus.wait_for_series("rekindle_vm_up{vm=\"db\"} == 1");
    prometheus.wait_for_series("rekindle_checkpoints_total{vm=\"web\"} > 2");
    let queries = dashboard_queries();
    assert!(queries.len() >= 15, "{queries:?}");
    for (title, query) in queries {
        if EMPTY.iter().any(|start| query.starts_with(start)) {
            let series = prometheus.query(&query).unwrap();
            assert!(series.is_empty(), "{title} has a value: {series:?}");
        } else {
            prometheus.wait_for_series(&query);
        }
    }
    assert_eq!(prometheus.firing(), BTreeSet::new());

    // The protector hangs, and an operation on another VM is interrupted.
    let pid = Pid::from_raw(i32::try_from(protector.child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let mut interrupted = lab.command(["replace-qemu", "db"]);
    interrupted.env("REKINDLE_FAULT", "warm.prepare.ready:kill");
    lab.finish(interrupted).killed();
    let both: BTreeSet<String> =
        ["RekindleCheckpointOverdue web", "RekindleNeedsRecovery db"].map(str::to_owned).into();
    wait_for("both alerts", DEADLINE, || Some(()).filter(|()| prometheus.firing() == both));

    kill_process(pid, Signal::CONT).unwrap();
    db.rekindle(&["recover"]).ok();
    wait_for("the end of the alerts", DEADLINE, || Some(()).filter(|()| prometheus.firing().is_empty()));
    protector.next_checkpoint();
    protector.end();
    prometheus.end();
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    web.assert_sound();
    db.assert_sound();
}
