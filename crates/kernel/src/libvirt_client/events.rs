//! Delivers the events of libvirt's domains to their receivers.

use super::library::Object;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_longlong, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An event that QEMU has sent to libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorEvent {
    /// For example `STOP`.
    pub name: String,
    /// When QEMU sent it, since 1970.
    pub time: Duration,
}

/// A receiver of events.
pub(super) struct Subscriber {
    pub(super) names: &'static [&'static str],
    pub(super) events: SyncSender<MonitorEvent>,
}

/// The receivers of events by numbers that are never used twice. libvirt gets a number instead of a pointer: versions
/// differ in whether they release a registration that fails, and a second removal of a number does nothing.
pub(super) struct Subscribers {
    by_key: Mutex<BTreeMap<usize, Subscriber>>,
    next_key: AtomicUsize,
}

pub(super) static SUBSCRIBERS: Subscribers =
    Subscribers { by_key: Mutex::new(BTreeMap::new()), next_key: AtomicUsize::new(1) };

impl Subscribers {
    pub(super) fn add(&self, subscriber: Subscriber) -> usize {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(key, subscriber);
        key
    }

    pub(super) fn remove(&self, key: usize) {
        self.lock().remove(&key);
    }

    fn deliver(&self, key: usize, event: MonitorEvent) {
        if let Some(subscriber) = self.lock().get(&key)
            && subscriber.names.contains(&event.name.as_str())
        {
            // The receiver may have gone already, or have no room.
            let _ = subscriber.events.try_send(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Subscriber>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) extern "C" fn on_event(
    _connection: Object,
    _domain: Object,
    name: *const c_char,
    seconds: c_longlong,
    microseconds: c_uint,
    _details: *const c_char,
    key: *mut c_void,
) {
    // SAFETY: libvirt passes a string that lives until after the call.
    let name = unsafe { CStr::from_ptr(name) };
    let since_1970 = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    let time = since_1970 + Duration::from_micros(u64::from(microseconds));
    SUBSCRIBERS.deliver(key.addr(), MonitorEvent { name: name.to_string_lossy().into_owned(), time });
}

pub(super) extern "C" fn remove_subscriber(key: *mut c_void) {
    SUBSCRIBERS.remove(key.addr());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::sync_channel;

    #[test]
    fn a_receiver_gets_the_events_it_wants_as_far_as_it_has_room() {
        let (sender, receiver) = sync_channel(2);
        let key = SUBSCRIBERS.add(Subscriber { names: &["STOP", "RESUME"], events: sender });
        let event = |name: &str, ms| MonitorEvent { name: name.into(), time: Duration::from_millis(ms) };
        for (name, ms) in [("RTC_CHANGE", 1), ("STOP", 2), ("RESUME", 3), ("STOP", 4)] {
            SUBSCRIBERS.deliver(key, event(name, ms));
        }
        SUBSCRIBERS.remove(key);
        SUBSCRIBERS.remove(key);
        SUBSCRIBERS.deliver(key, event("STOP", 5));
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [event("STOP", 2), event("RESUME", 3)]);
    }
}
