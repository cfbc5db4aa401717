//! The metrics: names with base units, as Prometheus recommends.

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Gauge,
    Counter,
    Histogram,
    /// A gauge that is always 1. Its labels are the information.
    Info,
}

/// A metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name without the unit, and without the suffix of its kind.
    pub base: &'static str,
    pub unit: Option<&'static str>,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl Metric {
    /// Returns the name as in a query. That of a histogram is without `_bucket`, `_sum` and `_count`.
    #[must_use]
    pub fn name(&self) -> String {
        let unit = self.unit.map(|unit| format!("_{unit}")).unwrap_or_default();
        let suffix = match self.kind {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            Kind::Gauge | Kind::Histogram => "",
        };
        format!("{}{unit}{suffix}", self.base)
    }
}

const SECONDS: Option<&str> = Some("seconds");
const BYTES: Option<&str> = Some("bytes");
const VM: &[&str] = &["vm"];
const MANAGED: &[&str] = &["vm", "manager"];
const OPERATION: &[&str] = &["vm", "operation"];

/// Declares the metrics as constants, and [`CATALOG`] with all of them.
macro_rules! metrics {
    ($($id:ident: $kind:ident $base:literal, $unit:expr, $labels:expr, $help:literal;)*) => {
        $(pub const $id: Metric =
            Metric { base: $base, unit: $unit, kind: Kind::$kind, labels: $labels, help: $help };)*

        /// All metrics, in the order of the exposition.
        pub const CATALOG: &[Metric] = &[$($id),*];
    };
}

metrics! {
    BUILD: Info "rekindle_build", None, &["version"], "Version of the exporter";
    COLLECTION: Gauge "rekindle_collection_duration", SECONDS, &[], "Time that reading all figures took";
    UNREADABLE: Gauge "rekindle_unreadable", None, &["source"],
        "Number of VMs (vms) or libvirt domains (libvirt) whose figures are missing because their files cannot be read";
    GUESTS: Gauge "rekindle_guests", None, &["manager"], "Number of guests whose QEMU runs";
    VM_INFO: Info "rekindle_vm", None, &["vm", "manager", "qemu_version"], "A VM and the version of its QEMU";
    VM_UP: Gauge "rekindle_vm_up", None, MANAGED, "1 if the QEMU of the VM runs";
    QEMU_OUTDATED: Gauge "rekindle_qemu_outdated", None, MANAGED,
        "1 if the QEMU is older than the installed one, so that it must be replaced";
    NEEDS_RECOVERY: Gauge "rekindle_vm_needs_recovery", None, VM,
        "1 if an operation on the VM was interrupted and rekindle recover must be run";
    SUSPENDED: Gauge "rekindle_vm_suspended", None, VM, "1 if the VM is suspended for a reboot of the host";
    HELPERS_MISSING: Gauge "rekindle_vm_helpers_missing", None, VM,
        "Number of helper processes that the VM needs and that do not run";
    HELPER_RESTARTS: Counter "rekindle_vm_helper_restarts", None, &["vm", "helper"],
        "Restarts of a helper process that has died";
    PROTECTOR_UP: Gauge "rekindle_protector_up", None, VM, "1 if a process takes checkpoints of the VM";
    PROTECTOR_WAITING: Gauge "rekindle_protector_waiting", None, VM,
        "1 if no checkpoint is possible for now, for a reason other than the store";
    TRACKING_RESTARTS: Counter "rekindle_protector_tracking_restarts", None, VM,
        "How often the protector has started to track the memory again";
    CHECKPOINT_AGE: Gauge "rekindle_checkpoint_age", SECONDS, VM, "Time since the newest checkpoint was committed";
    CHECKPOINT_NUMBER: Gauge "rekindle_checkpoint_number", None, VM, "Number of the newest checkpoint";
    CHECKPOINT_INTERVAL: Gauge "rekindle_checkpoint_interval", SECONDS, VM, "Configured interval of checkpoints";
    LAST_INTERVAL: Gauge "rekindle_checkpoint_last_interval", SECONDS, VM, "Time between the last two checkpoints";
    MAX_LAG: Gauge "rekindle_checkpoint_max_lag", SECONDS, VM, "Value of --max-lag, if it was given";
    LAG_EXCEEDED: Counter "rekindle_checkpoint_lag_exceeded", None, VM,
        "How often the newest checkpoint was older than --max-lag";
    CHECKPOINTS: Counter "rekindle_checkpoints", None, VM, "Committed checkpoints";
    FULL_CHECKPOINTS: Counter "rekindle_checkpoints_full", None, VM,
        "Committed checkpoints with all of the guest's memory";
    PAUSE: Histogram "rekindle_checkpoint_pause", SECONDS, VM, "Time that a checkpoint stopped the guest";
    DURATION: Histogram "rekindle_checkpoint_duration", SECONDS, VM,
        "Time from the start of a checkpoint, before the guest is stopped, to its commit";
    COMMIT: Histogram "rekindle_checkpoint_commit", SECONDS, VM,
        "Time from the guest's resume to the commit of the checkpoint";
    DIRTY: Counter "rekindle_checkpoint_dirty", BYTES, VM, "Bytes of pages that may have changed between checkpoints";
    WRITTEN: Counter "rekindle_checkpoint_written", BYTES, VM, "Bytes written to the store";
    STORE_FAILURES: Counter "rekindle_store_failures", None, VM, "Failed attempts to write the store";
    STORE_AWAY: Gauge "rekindle_store_away", None, VM, "1 if the last attempt to write the store has failed";
    STORE_SIZE: Gauge "rekindle_store_size", BYTES, VM,
        "Size of the file system with the store, as of the newest checkpoint; only for a directory";
    STORE_AVAILABLE: Gauge "rekindle_store_available", BYTES, VM,
        "Available space of the file system with the store, as of the newest checkpoint; only for a directory";
    OWNER_EPOCH: Gauge "rekindle_owner_epoch", None, VM, "Owner epoch of the newest checkpoint";
    PAGER_UP: Gauge "rekindle_pager_up", None, VM,
        "While memory of a restored guest is missing: 1 if its pager runs";
    FILL_MEMORY: Gauge "rekindle_fill_memory", BYTES, VM, "Memory that the pager of a restored guest loads";
    FILL_MISSING: Gauge "rekindle_fill_missing", BYTES, VM, "Memory that the pager has still to load";
    OPERATIONS: Counter "rekindle_operations", None, OPERATION, "Operations in the timeline of the VM";
    REPLACEMENT_STOPPED: Histogram "rekindle_replacement_stopped", SECONDS, OPERATION,
        "Time from the stop of the guest to its resume in a replacement of its QEMU";
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs;

    /// The rows of the reference, as `docs/metrics.md` has them.
    fn reference() -> String {
        let row = |metric: &Metric| {
            let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            let kind = format!("{:?}", metric.kind).to_lowercase();
            format!("| `{}` | {kind} | {} | {} |\n", metric.name(), labels.join(", "), metric.help)
        };
        CATALOG.iter().map(row).collect()
    }

    #[test]
    fn the_reference_has_exactly_these_metrics() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let page = fs::read_to_string(path).unwrap();
        let rows =
            |text: &str| text.lines().filter(|line| line.starts_with("| `rekindle_")).collect::<Vec<_>>().join("\n");
        assert_eq!(rows(&page), rows(&reference()), "docs/metrics.md needs these rows:\n{}", reference());
    }

    /// Returns the names of our metrics in a text, each without the suffixes of histograms.
    fn names_in(text: &str) -> Vec<String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = text.split(|c: char| !is_part(c)).filter(|word| word.starts_with("rekindle_"));
        let strip = |word: &str| {
            let suffix = ["_bucket", "_sum", "_count"].into_iter().find_map(|suffix| word.strip_suffix(suffix));
            suffix.unwrap_or(word).to_owned()
        };
        words.map(strip).collect()
    }

    #[test]
    fn rules_and_dashboard_use_only_metrics_that_exist() {
        let known: Vec<_> = CATALOG.iter().map(Metric::name).collect();
        for file in ["prometheus/rekindle.rules.yml", "prometheus/rekindle.rules.test.yml", "grafana/rekindle.json"] {
            let text = fs::read_to_string(format!("{}/../../packaging/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
            let names = names_in(&text);
            assert!(names.len() > 5, "{file}: {names:?}");
            for name in names {
                assert!(known.contains(&name), "{file} uses {name}, which does not exist");
            }
        }
    }

    #[test]
    fn the_dashboard_is_json_and_its_panels_have_queries() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/grafana/rekindle.json");
        let dashboard: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        assert!(panels.len() >= 8);
        for panel in panels.iter().filter(|panel| panel["type"] != "row") {
            assert!(panel["targets"][0]["expr"].is_string(), "{}", panel["title"]);
        }
    }
}
