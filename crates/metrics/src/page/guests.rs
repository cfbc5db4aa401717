//! The guests as the page shows them: state, protection, last operation.

use crate::catalog::{self as metric, Metric};
use crate::collect::{Activity, Collected, LIBVIRT};
use crate::exposition::{Snapshot, Value};
use crate::timeline::{LastOperation, shortened};
use rekindle_vm::timeline::Phase;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// The newest checkpoint is overdue if it is older than this number of intervals, as in the alert rules.
const OVERDUE_INTERVALS: f64 = 5.0;
/// Limit of the shown characters of the name of a guest. libvirt has none.
const MAX_NAME_CHARS: usize = 128;
const MAX_OPERATION_CHARS: usize = 64;

/// How much attention something needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// Not as usual, but as chosen by an administrator.
    Info,
    Warning,
    Error,
}

/// The state of a guest or of its protection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Condition {
    pub level: Level,
    pub text: String,
    /// What it means, or what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Condition {
    fn new(level: Level, text: &str) -> Self {
        Self { level, text: text.into(), detail: None }
    }

    fn with(level: Level, text: &str, detail: impl Into<String>) -> Self {
        Self { level, text: text.into(), detail: Some(detail.into()) }
    }
}

/// An operation as the page shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ShownOperation {
    name: String,
    /// In µs since 1970.
    started_us: u64,
    stopped_us: Option<u64>,
    omitted_steps: u64,
    /// Phase, name, offset from the start in µs and duration in µs of each step.
    steps: Vec<(Phase, String, u64, u64)>,
}

impl ShownOperation {
    fn of(operation: &LastOperation) -> Self {
        let steps = operation.steps.iter().map(|step| (step.phase, step.name.clone(), step.offset_us, step.us));
        Self {
            name: operation.name.clone(),
            started_us: operation.started_us,
            stopped_us: operation.stopped_us(),
            omitted_steps: operation.omitted_steps,
            steps: steps.collect(),
        }
    }

    /// Drops the steps, so that only the name and the times remain.
    pub(crate) fn omit_steps(&mut self) {
        self.omitted_steps = self.omitted_steps.saturating_add(self.steps.len() as u64);
        self.steps.clear();
    }
}

/// A guest as the page shows it, without what changes with each checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Guest {
    pub name: String,
    pub manager: String,
    qemu: Option<String>,
    /// None: not known.
    outdated: Option<bool>,
    pub state: Condition,
    pub protection: Condition,
    every_ms: Option<u64>,
    /// The newest checkpoint is overdue if it is older than this.
    limit_ms: Option<u64>,
    store_free_percent: Option<u8>,
    pub operation: Option<ShownOperation>,
}

/// What changes with each checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Checkpoints {
    pub age_s: Option<f64>,
    pub number: Option<u64>,
    pub pauses: u64,
    pub pause_sum_s: f64,
}

/// The figures of one guest.
#[derive(Debug, Default)]
struct Figures {
    manager: String,
    qemu: Option<String>,
    is_up: bool,
    outdated: Option<bool>,
    needs_recovery: bool,
    is_suspended: bool,
    helpers_missing: f64,
    /// None: never protected.
    protector_is_up: Option<bool>,
    is_waiting: bool,
    store_is_away: bool,
    every_s: Option<f64>,
    max_lag_s: Option<f64>,
    pager_is_up: Option<bool>,
    fill_total: f64,
    fill_missing: f64,
    store_size: f64,
    store_available: Option<f64>,
    checkpoints: Checkpoints,
}

/// A metric with the labels `vm`, and where its value goes.
type Assignment = (&'static Metric, fn(&mut Figures, f64));

const ASSIGNMENTS: [Assignment; 15] = [
    (&metric::NEEDS_RECOVERY, |figures, value| figures.needs_recovery = value > 0.0),
    (&metric::SUSPENDED, |figures, value| figures.is_suspended = value > 0.0),
    (&metric::HELPERS_MISSING, |figures, value| figures.helpers_missing = value),
    (&metric::PROTECTOR_UP, |figures, value| figures.protector_is_up = Some(value > 0.0)),
    (&metric::PROTECTOR_WAITING, |figures, value| figures.is_waiting = value > 0.0),
    (&metric::STORE_AWAY, |figures, value| figures.store_is_away = value > 0.0),
    (&metric::CHECKPOINT_INTERVAL, |figures, value| figures.every_s = Some(value)),
    (&metric::MAX_LAG, |figures, value| figures.max_lag_s = Some(value)),
    (&metric::PAGER_UP, |figures, value| figures.pager_is_up = Some(value > 0.0)),
    (&metric::FILL_MEMORY, |figures, value| figures.fill_total = value),
    (&metric::FILL_MISSING, |figures, value| figures.fill_missing = value),
    (&metric::STORE_SIZE, |figures, value| figures.store_size = value),
    (&metric::STORE_AVAILABLE, |figures, value| figures.store_available = Some(value)),
    (&metric::CHECKPOINT_AGE, |figures, value| figures.checkpoints.age_s = Some(value)),
    (&metric::CHECKPOINT_NUMBER, |figures, value| figures.checkpoints.number = Some(value as u64)),
];

/// Returns the guests in the order of their names. A domain of libvirt may have the name of a VM.
pub(crate) fn guests(collected: &Collected) -> Vec<(Guest, Checkpoints)> {
    let snapshot = &collected.snapshot;
    // By name, and whether libvirt manages it.
    let mut all: BTreeMap<(&str, bool), Figures> = BTreeMap::new();
    for (labels, value) in snapshot.series(&metric::VM_UP) {
        if let [name, manager] = labels {
            let figures = all.entry((name, manager == LIBVIRT)).or_default();
            (figures.manager, figures.is_up) = (manager.clone(), number(value) > 0.0);
        }
    }
    for (labels, value) in snapshot.series(&metric::QEMU_OUTDATED) {
        if let [name, manager] = labels
            && let Some(figures) = all.get_mut(&(name.as_str(), manager == LIBVIRT))
        {
            figures.outdated = Some(number(value) > 0.0);
        }
    }
    let mut vms: HashMap<&str, &mut Figures> = HashMap::new();
    vms.extend(all.iter_mut().filter(|((_, is_libvirt), _)| !is_libvirt).map(|((name, _), figures)| (*name, figures)));
    add_figures_of_vms(snapshot, &mut vms);
    let no_activity = Activity::default();
    let guest = |((name, is_libvirt), figures): (&(&str, bool), &Figures)| {
        let activity = collected.activities.get(*name).filter(|_| !is_libvirt).unwrap_or(&no_activity);
        (guest(name, figures, activity), figures.checkpoints)
    };
    all.iter().map(guest).collect()
}

fn add_figures_of_vms(snapshot: &Snapshot, vms: &mut HashMap<&str, &mut Figures>) {
    for (metric, assign) in ASSIGNMENTS {
        for (labels, value) in snapshot.series(metric) {
            if let Some(figures) = labels.first().and_then(|name| vms.get_mut(name.as_str())) {
                assign(figures, number(value));
            }
        }
    }
    for (labels, value) in snapshot.series(&metric::PAUSE) {
        let figures = labels.first().and_then(|name| vms.get_mut(name.as_str()));
        if let (Some(figures), Value::Histogram { sum, count, .. }) = (figures, value) {
            (figures.checkpoints.pauses, figures.checkpoints.pause_sum_s) = (*count, *sum);
        }
    }
    for (labels, _) in snapshot.series(&metric::VM_INFO) {
        if let [name, _, version] = labels
            && let Some(figures) = vms.get_mut(name.as_str())
        {
            figures.qemu = Some(version.clone()).filter(|version| !version.is_empty());
        }
    }
}

fn number(value: &Value) -> f64 {
    match value {
        Value::Number(number) => *number,
        Value::Count(count) => *count as f64,
        Value::Histogram { .. } => 0.0,
    }
}

fn guest(name: &str, figures: &Figures, activity: &Activity) -> Guest {
    let limit_s = limit_s(figures);
    let free = figures.store_available.filter(|_| figures.store_size > 0.0);
    Guest {
        name: shortened(name, MAX_NAME_CHARS),
        manager: figures.manager.clone(),
        qemu: figures.qemu.clone(),
        outdated: figures.outdated,
        state: state(name, figures, activity),
        protection: protection(figures, limit_s),
        every_ms: figures.every_s.map(|s| (s * 1e3) as u64),
        limit_ms: limit_s.map(|s| (s * 1e3) as u64),
        store_free_percent: free.map(|free| (free / figures.store_size * 100.0) as u8),
        operation: activity.last.as_ref().map(ShownOperation::of),
    }
}

/// Returns the age above which the newest checkpoint is overdue.
fn limit_s(figures: &Figures) -> Option<f64> {
    let five_intervals = figures.every_s.map(|s| s * OVERDUE_INTERVALS);
    match (figures.max_lag_s, five_intervals) {
        (Some(max_lag), Some(intervals)) => Some(max_lag.min(intervals)),
        (max_lag, intervals) => max_lag.or(intervals),
    }
}

fn state(name: &str, figures: &Figures, activity: &Activity) -> Condition {
    let shown_name = shortened(name, MAX_NAME_CHARS);
    if figures.needs_recovery {
        let detail = format!("An operation was interrupted. Run: rekindle recover {shown_name}");
        return Condition::with(Level::Error, "needs recovery", detail);
    }
    if let Some(operation) = &activity.running {
        let detail = format!("Running now: {}", shortened(operation, MAX_OPERATION_CHARS));
        return Condition::with(Level::Info, "busy", detail);
    }
    if figures.is_suspended {
        return Condition::with(Level::Info, "suspended", "Suspended for a reboot of the host.");
    }
    if !figures.is_up {
        return match activity.is_prepared {
            true => Condition::with(Level::Info, "prepared", "A QEMU waits with empty RAM for a checkpoint."),
            false => Condition::with(Level::Info, "ended", "Its QEMU does not run."),
        };
    }
    if figures.pager_is_up == Some(false) {
        return Condition::with(
            Level::Error,
            "degraded",
            "Memory is missing and the pager does not run: the guest waits for each page that is not loaded yet.",
        );
    }
    if figures.helpers_missing > 0.0 {
        let missing = match figures.helpers_missing {
            1.0 => "1 helper process is missing".to_owned(),
            count => format!("{count} helper processes are missing"),
        };
        let detail = format!("{missing}. Run: rekindle show {shown_name}");
        return Condition::with(Level::Error, "degraded", detail);
    }
    if figures.fill_missing > 0.0 && figures.fill_total > 0.0 {
        let percent = (1.0 - figures.fill_missing / figures.fill_total) * 100.0;
        return Condition::with(Level::Info, "loading", format!("{percent:.0} % of its memory is loaded."));
    }
    Condition::new(Level::Ok, "running")
}

fn protection(figures: &Figures, limit_s: Option<f64>) -> Condition {
    let Some(is_up) = figures.protector_is_up else {
        return Condition::new(Level::Info, "not protected");
    };
    if !is_up && figures.is_up {
        return Condition::with(Level::Warning, "protector ended", "The guest runs, and no process takes checkpoints.");
    }
    if !is_up {
        return Condition::with(Level::Info, "not protected", "The guest does not run.");
    }
    if figures.store_is_away {
        return Condition::with(Level::Error, "store away", "The last attempt to write the store has failed.");
    }
    if figures.is_waiting {
        let detail = "No checkpoint is possible for now, for a reason other than the store.";
        return Condition::with(Level::Warning, "waiting", detail);
    }
    let age_s = figures.checkpoints.age_s;
    if let (Some(age), Some(limit)) = (age_s, limit_s)
        && age > limit
    {
        let detail = format!("The newest checkpoint is older than {limit} s.");
        return Condition::with(Level::Error, "overdue", detail);
    }
    match age_s {
        Some(_) => Condition::new(Level::Ok, "protected"),
        None => Condition::with(Level::Info, "starting", "No checkpoint has been committed yet."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that runs and whose protector has committed a checkpoint a second ago.
    fn protected() -> Figures {
        Figures {
            is_up: true,
            protector_is_up: Some(true),
            every_s: Some(2.0),
            checkpoints: Checkpoints { age_s: Some(1.0), ..Checkpoints::default() },
            ..Figures::default()
        }
    }

    fn shown(figures: &Figures, activity: &Activity) -> (String, String) {
        let guest = guest("web", figures, activity);
        (guest.state.text, guest.protection.text)
    }

    #[test]
    fn the_most_important_state_is_shown() {
        let idle = Activity::default();
        let busy = Activity { running: Some("replace-qemu --how warm".into()), ..Activity::default() };
        let prepared = Activity { is_prepared: true, ..Activity::default() };
        assert_eq!(shown(&protected(), &idle).0, "running");
        assert_eq!(shown(&protected(), &busy).0, "busy");
        assert_eq!(shown(&Figures { needs_recovery: true, ..protected() }, &busy).0, "needs recovery");
        assert_eq!(shown(&Figures { is_suspended: true, is_up: false, ..protected() }, &idle).0, "suspended");
        assert_eq!(shown(&Figures { is_up: false, ..protected() }, &idle).0, "ended");
        assert_eq!(shown(&Figures { is_up: false, ..protected() }, &prepared).0, "prepared");
        assert_eq!(shown(&Figures { helpers_missing: 1.0, ..protected() }, &idle).0, "degraded");
        let fill = Figures { fill_total: 100.0, fill_missing: 25.0, pager_is_up: Some(true), ..protected() };
        assert_eq!(guest("web", &fill, &idle).state.detail.as_deref(), Some("75 % of its memory is loaded."));
        assert_eq!(shown(&Figures { pager_is_up: Some(false), ..fill }, &idle).0, "degraded");
    }

    #[test]
    fn the_most_important_problem_of_the_protection_is_shown() {
        let text = |figures: &Figures| shown(figures, &Activity::default()).1;
        assert_eq!(text(&Figures::default()), "not protected");
        assert_eq!(text(&protected()), "protected");
        assert_eq!(text(&Figures { protector_is_up: Some(false), ..protected() }), "protector ended");
        assert_eq!(text(&Figures { protector_is_up: Some(false), is_up: false, ..protected() }), "not protected");
        assert_eq!(text(&Figures { is_waiting: true, ..protected() }), "waiting");
        assert_eq!(text(&Figures { is_waiting: true, store_is_away: true, ..protected() }), "store away");
        let aged = |age_s| Checkpoints { age_s, ..Checkpoints::default() };
        assert_eq!(text(&Figures { checkpoints: aged(Some(9.9)), ..protected() }), "protected");
        assert_eq!(text(&Figures { checkpoints: aged(Some(10.1)), ..protected() }), "overdue");
        assert_eq!(text(&Figures { checkpoints: aged(Some(4.0)), max_lag_s: Some(3.0), ..protected() }), "overdue");
        assert_eq!(text(&Figures { checkpoints: aged(None), ..protected() }), "starting");
    }

    #[test]
    fn a_vm_and_a_domain_of_one_name_are_two_guests() {
        let mut snapshot = Snapshot::default();
        snapshot.add_flag(&metric::VM_UP, &["web", "attached"], true);
        snapshot.add_flag(&metric::VM_UP, &["web", LIBVIRT], false);
        snapshot.add_flag(&metric::QEMU_OUTDATED, &["web", "attached"], true);
        snapshot.add_flag(&metric::PROTECTOR_UP, &["web"], true);
        snapshot.add(&metric::CHECKPOINT_AGE, &["web"], Value::Number(f64::NAN));
        snapshot.add(&metric::STORE_SIZE, &["web"], Value::Count(1000));
        snapshot.add(&metric::STORE_AVAILABLE, &["web"], Value::Count(u64::MAX));
        let found = guests(&Collected { snapshot, activities: BTreeMap::new() });
        let [(vm, _), (domain, _)] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(
            (vm.manager.as_str(), vm.protection.text.as_str(), vm.outdated),
            ("attached", "protected", Some(true))
        );
        assert_eq!((domain.state.text.as_str(), domain.protection.text.as_str()), ("ended", "not protected"));
        assert_eq!(vm.store_free_percent, Some(u8::MAX), "of a damaged record");
    }
}
