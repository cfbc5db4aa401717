//! What the page has been sent: the guests, their last minutes, and what of them has changed.

use super::guests::{Checkpoints, Guest, guests};
use crate::catalog as metric;
use crate::collect::Collected;
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use std::collections::{BTreeMap, HashSet, VecDeque};

/// Limit of the guests on the page. Others are counted.
pub(crate) const MAX_GUESTS: usize = 512;
/// Limit of the samples that are kept of each guest.
pub(crate) const MAX_SAMPLES: usize = 300;
/// Limit of the data of an event. No single item is longer: samples have at most 60 bytes each.
const MAX_EVENT_BYTES: usize = 32 << 10;
/// Limit of the data of a guest. The steps of its operation are left out of a longer one.
const MAX_GUEST_BYTES: usize = 8 << 10;
/// The mean of pauses is known only if there was a sample within this number of intervals.
const MAX_GAP_INTERVALS: u64 = 3;
/// Larger values come from damaged records, and would only make events longer.
const MAX_AGE_MS: u64 = 1 << 40;

/// The figures of a guest's checkpoints at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    at_ms: u64,
    age_ms: Option<u64>,
    /// Mean of the pauses since the sample before.
    pause_us: Option<u64>,
}

/// A guest that was sent.
#[derive(Debug)]
struct Known {
    id: u32,
    /// The guest as it was sent.
    data: String,
    checkpoints: Checkpoints,
    samples: VecDeque<Sample>,
}

/// The guests, and the history of each.
#[derive(Debug)]
pub(crate) struct History {
    interval_ms: u64,
    host: String,
    version: &'static str,
    /// By name, and whether libvirt manages it.
    guests: BTreeMap<(String, bool), Known>,
    next_id: u32,
    /// When the last sample was taken.
    sampled_at_ms: u64,
    summary: Summary,
}

/// What concerns all guests together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Summary {
    guests: usize,
    /// Number of guests that are not on the page.
    omitted: usize,
    unreadable_vms: u64,
    unreadable_domains: u64,
}

impl History {
    pub(crate) fn new(host: String, version: &'static str, interval_ms: u64) -> Self {
        Self {
            interval_ms,
            host,
            version,
            guests: BTreeMap::new(),
            next_id: 0,
            sampled_at_ms: 0,
            summary: Summary::default(),
        }
    }

    /// Notes what was collected. Returns the events with what has changed.
    pub(crate) fn update(&mut self, collected: &Collected, now_ms: u64) -> Vec<Bytes> {
        let mut found = guests(collected);
        let omitted = found.len().saturating_sub(MAX_GUESTS);
        found.truncate(MAX_GUESTS);
        let is_continuous = now_ms.saturating_sub(self.sampled_at_ms) <= self.interval_ms * MAX_GAP_INTERVALS;
        self.sampled_at_ms = now_ms;
        let summary = Summary {
            guests: found.len() + omitted,
            omitted,
            unreadable_vms: count(collected, "vms"),
            unreadable_domains: count(collected, "libvirt"),
        };
        let mut events = Vec::new();
        if summary != self.summary {
            self.summary = summary;
            events.push(event("summary", &json!(summary).to_string()));
        }
        let names: HashSet<_> = found.iter().map(|(guest, _)| key(guest)).collect();
        let removed: Vec<u32> =
            self.guests.iter().filter(|(key, _)| !names.contains(*key)).map(|(_, known)| known.id).collect();
        if !removed.is_empty() {
            self.guests.retain(|key, _| names.contains(key));
            events.push(event("removed", &json!(removed).to_string()));
        }
        let (mut changed, mut samples) = (Vec::new(), Vec::new());
        for (guest, checkpoints) in found {
            let known = self.guests.entry(key(&guest)).or_insert_with(|| {
                self.next_id = self.next_id.wrapping_add(1);
                Known { id: self.next_id, data: String::new(), checkpoints, samples: VecDeque::new() }
            });
            let data = guest_data(known.id, guest);
            if known.data != data {
                changed.push(data.clone());
                known.data = data;
            }
            if let Some(sample) = known.sample(checkpoints, now_ms, is_continuous) {
                samples.push(json!([known.id, sample.age_ms, sample.pause_us, checkpoints.number]).to_string());
            }
        }
        events.extend(list_events("guests", &changed));
        // Sent even if there is no sample: the page then knows that it is up to date.
        events.extend(list_events("samples", &[vec![now_ms.to_string()], samples].concat()));
        events
    }

    /// Returns the events for a page that was just opened.
    pub(crate) fn all(&self) -> VecDeque<Bytes> {
        let start = json!({
            "format": 1,
            "host": self.host,
            "version": self.version,
            "interval_ms": self.interval_ms,
            "max_samples": MAX_SAMPLES,
        });
        let mut events = VecDeque::from([event("start", &start.to_string())]);
        events.push_back(event("summary", &json!(self.summary).to_string()));
        let data: Vec<_> = self.guests.values().map(|known| known.data.clone()).collect();
        events.extend(list_events("guests", &data));
        let samples = self.guests.values().filter(|known| !known.samples.is_empty()).map(Known::history_data);
        events.extend(list_events("history", &samples.collect::<Vec<_>>()));
        events.push_back(event("complete", &self.sampled_at_ms.to_string()));
        events
    }
}

impl Known {
    /// Adds a sample, unless the guest was never protected.
    fn sample(&mut self, new: Checkpoints, at_ms: u64, is_continuous: bool) -> Option<Sample> {
        let old = std::mem::replace(&mut self.checkpoints, new);
        let pauses = new.pauses.saturating_sub(old.pauses);
        let mean_s = (new.pause_sum_s - old.pause_sum_s) / pauses as f64;
        let sample = Sample {
            at_ms,
            age_ms: new.age_s.map(|s| ((s * 1e3) as u64).min(MAX_AGE_MS)),
            // Counters start again with each protector.
            pause_us: (is_continuous && pauses > 0 && mean_s >= 0.0).then_some(((mean_s * 1e6) as u64).min(MAX_AGE_MS)),
        };
        new.age_s?;
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        Some(sample)
    }

    /// Returns id, number of the newest checkpoint, and of each sample the time since the one before, age and pause.
    fn history_data(&self) -> String {
        let mut before_ms = 0;
        let mut values = Vec::with_capacity(self.samples.len() * 3);
        for sample in &self.samples {
            values.push(Some(sample.at_ms.saturating_sub(before_ms)));
            values.extend([sample.age_ms, sample.pause_us]);
            before_ms = sample.at_ms;
        }
        json!([self.id, self.checkpoints.number, values]).to_string()
    }
}

fn key(guest: &Guest) -> (String, bool) {
    (guest.name.clone(), guest.manager == crate::collect::LIBVIRT)
}

fn count(collected: &Collected, source: &str) -> u64 {
    collected.snapshot.number(&metric::UNREADABLE, &[source]).unwrap_or_default() as u64
}

/// Returns a guest as JSON, with its id.
fn guest_data(id: u32, mut guest: Guest) -> String {
    #[derive(Serialize)]
    struct Identified<'a> {
        id: u32,
        #[serde(flatten)]
        guest: &'a Guest,
    }
    let data = |guest: &Guest| serde_json::to_string(&Identified { id, guest }).unwrap_or_default();
    let whole = data(&guest);
    if whole.len() <= MAX_GUEST_BYTES {
        return whole;
    }
    if let Some(operation) = &mut guest.operation {
        operation.omit_steps();
    }
    data(&guest)
}

/// Returns an event of the stream. JSON has no line breaks.
fn event(name: &str, data: &str) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// Returns events with these items in arrays of at most [`MAX_EVENT_BYTES`]; none without items.
fn list_events(name: &str, items: &[String]) -> Vec<Bytes> {
    let mut events = Vec::new();
    let mut data = String::new();
    for item in items {
        if !data.is_empty() && data.len() + item.len() > MAX_EVENT_BYTES {
            events.push(event(name, &format!("[{data}]")));
            data.clear();
        }
        if !data.is_empty() {
            data.push(',');
        }
        data.push_str(item);
    }
    if !data.is_empty() {
        events.push(event(name, &format!("[{data}]")));
    }
    events
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::collect::Activity;
    use crate::exposition::{Snapshot, Value};
    use crate::timeline::{LastOperation, OperationStep};
    use rekindle_vm::timeline::Phase;

    /// Guests with these names and ages of checkpoints.
    fn collected(guests: &[(&str, f64)], pauses: (u64, f64)) -> Collected {
        let mut snapshot = Snapshot::default();
        for (name, age_s) in guests {
            snapshot.add_flag(&metric::VM_UP, &[name, "rekindle"], true);
            snapshot.add_flag(&metric::PROTECTOR_UP, &[name], true);
            snapshot.add(&metric::CHECKPOINT_AGE, &[name], Value::Number(*age_s));
            snapshot.add(&metric::CHECKPOINT_INTERVAL, &[name], Value::Number(1.0));
            let (count, sum) = pauses;
            snapshot.add(&metric::PAUSE, &[name], Value::Histogram { sum, count, buckets: Vec::new() });
        }
        Collected { snapshot, activities: BTreeMap::new() }
    }

    fn text(events: impl IntoIterator<Item = Bytes>) -> String {
        events.into_iter().map(|event| String::from_utf8(event.to_vec()).unwrap()).collect()
    }

    fn names(events: &str) -> Vec<&str> {
        events.lines().filter_map(|line| line.strip_prefix("event: ")).collect()
    }

    #[test]
    fn only_what_has_changed_is_sent() {
        let mut history = History::new("host".into(), "1", 1000);
        let first = text(history.update(&collected(&[("db", 0.5), ("web", 0.5)], (1, 0.010)), 10_000));
        assert_eq!(names(&first), ["summary", "guests", "samples"]);
        let second = text(history.update(&collected(&[("db", 0.25), ("web", 1.5)], (3, 0.016)), 11_000));
        assert_eq!(second, "event: samples\ndata: [11000,[1,250,3000,null],[2,1500,3000,null]]\n\n");
        let third = text(history.update(&collected(&[("web", 6.0)], (3, 0.016)), 12_000));
        assert_eq!(names(&third), ["summary", "removed", "guests", "samples"]);
        assert!(third.contains("data: [1]\n") && third.contains("\"overdue\""), "{third}");
        assert!(third.ends_with("data: [12000,[2,6000,null,null]]\n\n"), "{third}");
        let all = text(history.all());
        assert_eq!(names(&all), ["start", "summary", "guests", "history", "complete"]);
        assert!(all.contains("[2,null,[10000,500,null,1000,1500,3000,1000,6000,null]]"), "{all}");
    }

    #[test]
    fn after_a_gap_and_with_a_new_protector_the_pause_is_unknown() {
        let mut history = History::new("host".into(), "1", 1000);
        history.update(&collected(&[("web", 0.5)], (5, 0.1)), 0);
        let restarted = text(history.update(&collected(&[("web", 0.5)], (1, 0.01)), 1000));
        assert!(restarted.contains("[1,500,null,null]"), "{restarted}");
        let later = text(history.update(&collected(&[("web", 0.5)], (9, 0.09)), 60_000));
        assert!(later.contains("[1,500,null,null]"), "{later}");
    }

    #[test]
    fn the_number_of_samples_is_limited() {
        let mut history = History::new("host".into(), "1", 1000);
        for second in 0..MAX_SAMPLES as u64 + 10 {
            history.update(&collected(&[("web", f64::MAX)], (second, f64::INFINITY)), second * 1000);
        }
        assert!(history.guests.values().all(|known| known.samples.len() == MAX_SAMPLES));
        assert!(text(history.all()).len() < 20_000);
    }

    #[test]
    fn guests_and_the_length_of_events_are_limited() {
        let long = "\u{1}".repeat(500);
        let names: Vec<_> = (0..MAX_GUESTS + 10).map(|number| format!("{number:04}{long}")).collect();
        let guests: Vec<_> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
        let mut found = collected(&guests, (1, 1.0));
        let step = |_| OperationStep { phase: Phase::Prepare, name: long.clone(), offset_us: u64::MAX, us: u64::MAX };
        let last = LastOperation {
            name: "replace-qemu".into(),
            started_us: u64::MAX,
            steps: (0..48).map(step).collect(),
            omitted_steps: u64::MAX,
        };
        let activity = Activity { last: Some(last), ..Activity::default() };
        found.activities = names.iter().map(|name| (name.clone(), activity.clone())).collect();
        let mut history = History::new("host".into(), "1", 1000);
        let events = history.update(&found, 1000);
        assert!(events.iter().all(|event| event.len() <= MAX_EVENT_BYTES + 100), "{}", events.len());
        let all = history.all();
        assert!(all.iter().all(|event| event.len() <= MAX_EVENT_BYTES + 100), "{}", all.len());
        assert!(text(all).contains("\"guests\":522,\"omitted\":10"));
        assert!(history.guests.values().all(|known| known.data.len() <= MAX_GUEST_BYTES));
    }
}
