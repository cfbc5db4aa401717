//! Events that arrived between answers, kept until the caller reads them.

use serde::Deserialize;
use serde_json::Value;
use std::collections::VecDeque;

/// Limits of the kept events; older ones are dropped. The bytes are those of the JSON.
const MAX_EVENTS_OF_ONE_NAME: usize = 64;
const MAX_EVENTS: usize = 1024;
const MAX_EVENT_BYTES: usize = 1 << 20;

/// An event that QEMU has sent.
#[derive(Debug, Clone)]
pub struct Event {
    /// Name, e.g. `STOP`.
    pub name: String,
    /// Data of the event; null if there is none.
    pub data: Value,
    /// QEMU's time of the event: microseconds of the host's clock since 1970.
    pub host_us: u64,
}

#[derive(Deserialize)]
pub(super) struct Timestamp {
    seconds: u64,
    microseconds: u64,
}

impl Timestamp {
    pub(super) fn host_us(&self) -> u64 {
        self.seconds.saturating_mul(1_000_000).saturating_add(self.microseconds)
    }
}

#[derive(Debug)]
struct KeptEvent {
    event: Event,
    /// Length of the JSON.
    bytes: usize,
}

/// The kept events, oldest first.
#[derive(Debug, Default)]
pub(super) struct KeptEvents {
    events: VecDeque<KeptEvent>,
}

impl KeptEvents {
    /// Keeps an event. A guest can cause some kinds as often as it likes: they must not displace the others.
    pub(super) fn keep(&mut self, bytes: usize, event: Event) {
        tracing::trace!(event.name, %event.data, "QMP event");
        let has_same_name = |kept: &KeptEvent| kept.event.name == event.name;
        if self.events.iter().filter(|kept| has_same_name(kept)).count() >= MAX_EVENTS_OF_ONE_NAME
            && let Some(oldest) = self.events.iter().position(has_same_name)
        {
            self.events.remove(oldest);
        }
        self.events.push_back(KeptEvent { event, bytes });
        let mut total_bytes: usize = self.events.iter().map(|kept| kept.bytes).sum();
        while self.events.len() > MAX_EVENTS || (self.events.len() > 1 && total_bytes > MAX_EVENT_BYTES) {
            total_bytes -= self.events.pop_front().map_or(0, |kept| kept.bytes);
        }
    }

    pub(super) fn take_oldest(&mut self) -> Option<Event> {
        self.events.pop_front().map(|kept| kept.event)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.events.iter().map(|kept| &kept.event)
    }

    pub(super) fn clear(&mut self) {
        self.events.clear();
    }
}
