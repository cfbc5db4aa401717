//! Events that arrived between answers, kept until the caller reads them.

use serde::Deserialize;
use serde_json::Value;
use std::collections::VecDeque;

/// Limit of kept events of one name; older ones are dropped.
const OF_A_NAME: usize = 64;
/// Limit of kept events; older ones are dropped.
const MOST: usize = 1024;
/// Limit of the kept events in bytes of JSON.
const MOST_BYTES: usize = 1 << 20;

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

/// The kept events, oldest first, each with the length of its JSON in bytes.
#[derive(Debug, Default)]
pub(super) struct Events(VecDeque<(usize, Event)>);

impl Events {
    /// Keeps an event. A guest can cause some kinds as often as it likes: they must not displace the others.
    pub(super) fn keep(&mut self, bytes: usize, event: Event) {
        tracing::trace!(event.name, %event.data, "QMP event");
        let same = |(_, kept): &(usize, Event)| kept.name == event.name;
        if self.0.iter().filter(|kept| same(kept)).count() >= OF_A_NAME
            && let Some(oldest) = self.0.iter().position(same)
        {
            self.0.remove(oldest);
        }
        self.0.push_back((bytes, event));
        let mut total: usize = self.0.iter().map(|(bytes, _)| bytes).sum();
        while self.0.len() > MOST || (self.0.len() > 1 && total > MOST_BYTES) {
            total -= self.0.pop_front().map_or(0, |(bytes, _)| bytes);
        }
    }

    pub(super) fn take_oldest(&mut self) -> Option<Event> {
        self.0.pop_front().map(|(_, event)| event)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Event> {
        self.0.iter().map(|(_, event)| event)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
