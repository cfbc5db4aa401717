//! Signals that end this process, e.g. Ctrl-C. They wait while libvirt's daemon is stopped, until it has been started again,
//! and while a guest's RAM is moved, which needs this process.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_default};
use signal_hook::low_level::emulate_default_handler;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

const SIGNALS: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];

/// The handlers, which stay until the process ends.
#[derive(Debug)]
struct Handlers {
    /// Whether a signal ends the process immediately.
    is_ending: Arc<AtomicBool>,
    /// Whether a signal has arrived, for each of [`SIGNALS`].
    has_arrived: [Arc<AtomicBool>; SIGNALS.len()],
}

impl Handlers {
    fn install() -> Self {
        let handlers = Self { is_ending: Arc::new(AtomicBool::new(true)), has_arrived: Default::default() };
        for (signal, has_arrived) in SIGNALS.into_iter().zip(&handlers.has_arrived) {
            // Only signals that no process can handle are errors.
            let _ = register_conditional_default(signal, Arc::clone(&handlers.is_ending));
            let _ = register(signal, Arc::clone(has_arrived));
        }
        handlers
    }
}

/// Defers the signals until it is dropped. If one has arrived, it then ends the process.
#[derive(Debug)]
pub(crate) struct DeferredSignals(&'static Handlers);

impl DeferredSignals {
    pub(crate) fn begin() -> Self {
        static HANDLERS: OnceLock<Handlers> = OnceLock::new();
        let handlers = HANDLERS.get_or_init(Handlers::install);
        handlers.is_ending.store(false, Ordering::SeqCst);
        Self(handlers)
    }
}

impl Drop for DeferredSignals {
    fn drop(&mut self) {
        self.0.is_ending.store(true, Ordering::SeqCst);
        for (signal, has_arrived) in SIGNALS.into_iter().zip(&self.0.has_arrived) {
            if has_arrived.load(Ordering::SeqCst) {
                let _ = emulate_default_handler(signal);
            }
        }
    }
}
