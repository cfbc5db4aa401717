//! A second pair of hands: large parts of requests are copied and digested beside the engine's own thread, which takes the next one
//! meanwhile. One thread that does both gives about 3 GB/s; there are disks that give more.
//!
//! The hand touches buffers and the guest's memory, and nothing of the engine. What it has done is noted by the engine, in the block map as
//! well, when it has come back: until then the request is under way, and whoever touches the same blocks makes it stale.

use super::job::{Carried, Load};
use rustix::io::write;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Parts of fewer bytes are not worth the way.
pub(super) const LARGE: usize = 256 << 10;
/// So many parts are given to it ahead, at most.
const AHEAD: usize = 2;

/// A part that has come back.
pub(super) struct Back {
    pub job: usize,
    pub part: u32,
    pub carried: Carried,
}

/// See [the module](self). It ends when it is dropped.
pub(super) struct Hand {
    given: Sender<(usize, u32, Load)>,
    back: Receiver<Back>,
    /// Parts that it has not done yet.
    busy: Arc<AtomicUsize>,
    /// Parts that have not been taken back.
    out: usize,
}

impl Hand {
    /// Begin. Whoever waits for `wake` is told when something comes back.
    ///
    /// # Errors
    /// The system's: no thread can be had.
    pub fn begin(wake: Arc<OwnedFd>) -> io::Result<Self> {
        let (given, work) = channel::<(usize, u32, Load)>();
        let (done, back) = channel();
        let busy = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&busy);
        thread::Builder::new().name("disk-hand".into()).spawn(move || {
            for (job, part, load) in work {
                let carried = load.carry();
                left.fetch_sub(1, Ordering::Release);
                if done.send(Back { job, part, carried }).is_err() {
                    return;
                }
                let _ = write(&wake, &1u64.to_ne_bytes());
            }
        })?;
        Ok(Self { given, back, busy, out: 0 })
    }

    /// Whether it would begin with another part soon.
    pub fn is_free(&self) -> bool {
        self.busy.load(Ordering::Acquire) < AHEAD
    }

    /// Parts that it has, or that wait to be taken back.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Give it a part.
    ///
    /// # Errors
    /// The load, if there is no thread any more.
    pub fn give(&mut self, job: usize, part: u32, load: Load) -> Result<(), Load> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.given.send((job, part, load)).map_err(|refused| refused.0.2)?;
        self.out += 1;
        Ok(())
    }

    /// What has come back.
    pub fn take_back(&mut self) -> Option<Back> {
        let back = self.back.try_recv().ok()?;
        self.out -= 1;
        Some(back)
    }
}
