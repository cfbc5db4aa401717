//! Events that a probe reports while it runs.

use serde::{Deserialize, Serialize};

use crate::report::{Gap, Interval};

/// An event of a running probe. In JSON: an object whose `event` is the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// An interval ended. Its length is [`Options::interval`](crate::Options::interval), unless the stop has shortened
    /// it. Intervals are reported in order and without holes. If a reader has more than 4096 intervals to read, the
    /// oldest are lost.
    Interval(Interval),
    /// A gap ended, by an answer or by the stop. If a reader has more than 1024 gaps to read, the newest are lost.
    Gap(Gap),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flat_object_each() {
        let gap = Event::Gap(Gap { start_unix_ns: 5, length_us: 80_000 });
        assert_eq!(serde_json::to_string(&gap).unwrap(), r#"{"event":"gap","start_unix_ns":5,"length_us":80000}"#);
        let interval = Event::Interval(Interval { start_ms: 100, answered: 9, failed: 1, bytes: 0 });
        let line = serde_json::to_string(&interval).unwrap();
        assert_eq!(line, r#"{"event":"interval","start_ms":100,"answered":9,"failed":1,"bytes":0}"#);
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), interval);
    }
}
