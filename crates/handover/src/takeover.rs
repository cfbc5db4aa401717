//! The transfer of the guest's taps from the source to the destination.
//!
//! The source uses its taps until its guest is stopped. The destination is started with a *stand-in* for each, and with a
//! duplicate of the real one at another number, which it does not read. When the guest is stopped, the real tap takes the
//! place of the stand-in. Frames that arrive meanwhile wait in the tap. The source never loses a tap: if the guest returns
//! to it, it continues to read it.
//!
//! A tap may have several queues. QEMU reads the first one from its start on, and *attaches* the others when it loads the
//! guest's device, as many as the guest uses; until then it has them *detached*. The kernel rejects to attach a queue
//! twice, which would end the destination. So the queues that the destination has detached are detached before it loads.
//! Frames that wait in them are taken, and sent again.
//!
//! Name, format and network namespace of an interface are read from the open tap: another program may have renamed it or
//! moved it, and the source may be in another namespace.

use crate::HandoverError;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::packet::{Capture, Frame};
use rekindle_kernel::process::Process;
use rekindle_kernel::stand_in::StandIn;
use rekindle_kernel::{descriptor, tap};
use rekindle_qemu::command::TapSlot;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vhost;
use rekindle_vm::network::NetworkError;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::time::{SystemTime, UNIX_EPOCH};

/// A frame is captured this long before the kernel puts it into a queue, in µs, or shorter.
const DISCARD_MARGIN_US: u64 = 1_000;
/// Longest usual delay of QEMU's main loop, in µs.
const LAG_US: u64 = 2_000;
/// Longest delay on a busy host, in µs.
const BUSY_LAG_US: u64 = 500_000;
/// How many frames before the stop are sent again although QEMU usually has read them: those of a slow connection. A fast
/// one notices a loss by the frames that follow.
const BUSY_FRAMES: usize = 8;

/// Open taps, with the descriptor numbers that a QEMU's command line names.
pub type Taps = Vec<(OwnedFd, RawFd)>;

/// The taps of a guest whose source still uses them.
#[derive(Debug)]
pub struct TapTakeover {
    /// Kept until the guest runs: an interface is removed with its last descriptor, and the kernel takes some 15 ms to
    /// remove a stand-in.
    queues: Vec<PassedQueue>,
    /// Captures of the frames that the host sends into the taps, by interface. They are kept until the hand-over is settled: closing
    /// a capture takes the kernel many milliseconds, and the next guest could be handed over in that time.
    captures: BTreeMap<String, Capture>,
    /// What the queues that were detached have lost, by interface.
    taken: BTreeMap<String, TakenFrames>,
    /// Time of [`TapTakeover::give`], in µs since 1970.
    given_host_us: Option<u64>,
    /// Whether the kernel serves the guest's cards (vhost-net).
    has_vhost: bool,
}

impl TapTakeover {
    /// Duplicates the taps of the running `source`. Also returns the taps with which the destination starts.
    ///
    /// # Errors
    /// [`HandoverError::Network`]: a tap cannot be duplicated, or there can be no stand-in for it.
    pub fn prepare(slots: Vec<TapSlot>, source: Process) -> Result<(Taps, Self), HandoverError> {
        let (mut taps, mut queues) = (Taps::new(), Vec::new());
        for slot in slots {
            let interface = slot.interface.clone();
            let failed = |source| NetworkError::Tap { ifname: interface, source };
            let queue = PassedQueue::open(slot, source, &mut taps).map_err(failed)?;
            queues.push(queue);
        }
        Ok((
            taps,
            Self { queues, captures: BTreeMap::new(), taken: BTreeMap::new(), given_host_us: None, has_vhost: false },
        ))
    }

    /// Records that the kernel serves the guest's cards (vhost-net): it reads the tap while the guest runs, QEMU while the
    /// guest is stopped. QEMU discards what it has read when the kernel starts again.
    pub fn expect_vhost(&mut self) {
        self.has_vhost = true;
    }

    /// Returns whether the kernel serves the guest's cards ([`TapTakeover::expect_vhost`]).
    #[must_use]
    pub fn has_vhost(&self) -> bool {
        self.has_vhost
    }

    /// Checks that the kernel does not serve the cards of the stopped guest any more: it would read the tap, and write
    /// memory, with the destination.
    ///
    /// # Errors
    /// [`HandoverError::VhostRuns`]: it does. [`HandoverError::Qmp`]: the source cannot report it.
    pub fn check_vhost_stopped(&self, name: &str, source: &mut Qmp) -> Result<(), HandoverError> {
        if !self.has_vhost {
            return Ok(());
        }
        let served = vhost::served_cards(source)?;
        if served.is_empty() {
            return Ok(());
        }
        Err(HandoverError::VhostRuns { name: name.into(), cards: served.join(", ") })
    }

    /// Captures the frames that the host sends into the taps from now on, for [`TapTakeover::send_again`].
    ///
    /// # Errors
    /// [`HandoverError::Network`]: a capture cannot be opened.
    pub fn capture(&mut self) -> Result<(), HandoverError> {
        // All queues of an interface have one capture.
        let mut interfaces = BTreeSet::new();
        for queue in self.queues.iter().filter(|queue| interfaces.insert(&queue.slot.interface)) {
            let capture = queue.capture().map_err(|source| queue.failed(source))?;
            self.captures.insert(queue.slot.interface.clone(), capture);
        }
        Ok(())
    }

    /// Discards the frames that were captured until now.
    pub fn discard_captured(&self) {
        for capture in self.captures.values() {
            let _ = capture.frames();
        }
    }

    /// Returns the source's numbers of the queues that [`TapTakeover::give`] will detach.
    ///
    /// # Errors
    /// [`HandoverError::Network`]: it cannot be read whether a queue is attached.
    pub fn queues_to_detach(&self) -> Result<Vec<RawFd>, HandoverError> {
        let is_to_be_detached = |queue: &PassedQueue| queue.is_to_be_detached().map_err(|e| queue.failed(e));
        let queues = self.queues.iter().filter_map(|queue| match is_to_be_detached(queue) {
            Ok(false) => None,
            Ok(true) => Some(Ok(queue.slot.source)),
            Err(e) => Some(Err(e.into())),
        });
        queues.collect()
    }

    /// Gives the taps to the destination. No guest may run in the source any more.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the destination cannot be traced, or does not notice the change; some of its taps may be
    /// replaced already.
    pub fn give(&mut self, destination: Injector) -> Result<(), HandoverError> {
        if self.queues.is_empty() {
            return Ok(());
        }
        self.given_host_us = Some(now_us());
        for queue in &self.queues {
            if queue.is_to_be_detached().map_err(|e| queue.failed(e))? {
                let taken = queue.detach().map_err(|e| queue.failed(e))?;
                self.taken.entry(queue.slot.interface.clone()).or_default().add(taken);
            }
        }
        // The number at which a tap has waited is closed: it would keep the interface when the guest's card is unplugged.
        let moves: Vec<_> = self.queues.iter().map(|queue| (queue.slot.waiting, queue.slot.destination)).collect();
        let pid = destination.process().pid;
        descriptor::move_to(destination, &moves)
            .and_then(|()| self.queues.iter().try_for_each(PassedQueue::wake))
            .map_err(|source| HandoverError::File { path: format!("/proc/{pid}/fd").into(), source })
    }

    /// Sends again the frames that the source may have received after its guest had stopped. Returns the captures that
    /// are finished, without closing them. A capture that has no frame after the stop yet is tried again by the next
    /// call.
    pub fn send_again(&mut self, stopped_host_us: u64) -> Vec<Capture> {
        // With vhost the destination has lost a frame of each queue, too.
        let lost_of_queue = if self.has_vhost { 2 } else { 1 };
        let (mut finished, mut unfinished) = (Vec::new(), BTreeMap::new());
        for (interface, capture) in std::mem::take(&mut self.captures) {
            // Later calls find nothing taken.
            let taken = self.taken.remove(&interface).unwrap_or_default();
            let lost = lost_of_queue * self.queues_of(&interface);
            if resend(&capture, stopped_host_us, lost, &taken) > 0 {
                finished.push(capture);
            } else {
                unfinished.insert(interface, capture);
            }
        }
        self.captures = unfinished;
        finished
    }

    /// Sends again the frames that the destination may have received, after a failure. *Needs:* the destination has ended.
    pub fn send_again_to_source(&self) {
        let Some(given_host_us) = self.given_host_us else { return };
        let nothing = TakenFrames::default();
        for (interface, capture) in &self.captures {
            // Each QEMU may have read a frame of each queue. The source has kept its own.
            let lost = 2 * self.queues_of(interface);
            resend(capture, given_host_us, lost, self.taken.get(interface).unwrap_or(&nothing));
        }
    }

    fn queues_of(&self, interface: &str) -> usize {
        self.queues.iter().filter(|queue| queue.slot.interface == *interface).count()
    }
}

/// What the detached queues of an interface have lost.
#[derive(Debug, Default)]
struct TakenFrames {
    /// Frames that waited in them.
    frames: Vec<Frame>,
    /// Times in which frames may have been discarded with them: begin and end, in µs since 1970.
    discarded: Vec<(u64, u64)>,
}

impl TakenFrames {
    fn add(&mut self, other: Self) {
        self.frames.extend(other.frames);
        self.discarded.extend(other.discarded);
    }

    fn has_discarded(&self, frame: &Frame) -> bool {
        self.discarded.iter().any(|(begin, end)| (*begin..=*end).contains(&frame.host_us))
    }
}

/// A queue of a tap of the source, for which the destination has a stand-in.
#[derive(Debug)]
struct PassedQueue {
    slot: TapSlot,
    tap: OwnedFd,
    stand_in: StandIn,
}

impl PassedQueue {
    /// Adds to `taps` what the destination gets.
    fn open(slot: TapSlot, source: Process, taps: &mut Taps) -> io::Result<Self> {
        let tap = descriptor::take(source, slot.source)?;
        let features = tap::queue(tap.as_fd())?.features;
        // Several VMs may do this concurrently: the name must be unique for this process and this queue.
        let digest = xxhash_rust::xxh3::xxh3_64(format!("{}:{}", slot.interface, slot.source).as_bytes());
        let name = format!("rk{:x}{:06x}", std::process::id() & 0xff_ffff, digest & 0xff_ffff);
        let stand_in = tap::namespace(tap.as_fd())?.run(move || StandIn::open(&name, features))??;
        taps.push((stand_in.descriptor()?, slot.destination));
        taps.push((tap.try_clone()?, slot.waiting));
        Ok(Self { slot, tap, stand_in })
    }

    /// Returns whether the destination attaches the queue when it loads, and the source has it attached.
    fn is_to_be_detached(&self) -> io::Result<bool> {
        Ok(self.stand_in.is_detached()? && !tap::queue(self.tap.as_fd())?.is_detached)
    }

    /// Detaches the queue, and returns what it loses.
    fn detach(&self) -> io::Result<TakenFrames> {
        let frames = tap::waiting_frames(self.tap.as_fd())?;
        // Those that arrive from now on are discarded. They are captured.
        let begin_us = now_us();
        tap::detach(self.tap.as_fd())?;
        Ok(TakenFrames { frames, discarded: vec![(begin_us.saturating_sub(DISCARD_MARGIN_US), now_us())] })
    }

    /// Lets the destination notice the real tap, if it reads the queue.
    fn wake(&self) -> io::Result<()> {
        if self.stand_in.is_detached()? { Ok(()) } else { self.stand_in.wake() }
    }

    fn capture(&self) -> io::Result<Capture> {
        let name = tap::queue(self.tap.as_fd())?.interface;
        tap::namespace(self.tap.as_fd())?.run(move || Capture::open(&name))?
    }

    fn failed(&self, source: io::Error) -> NetworkError {
        NetworkError::Tap { ifname: self.slot.interface.clone(), source }
    }
}

/// Sends again the frames that a QEMU without a running guest may have read from its tap: it reads one, and keeps it.
/// Without this the frame would be lost, and a TCP client would wait 200 ms before it sends it again.
///
/// It is not known which frames were read. The first `count` frames after `since_host_us` are sent again, and those before
/// it that QEMU may not have read yet ([`first_unread`]), and what detached queues have lost (`taken`). A frame that had arrived arrives twice, as frames may. Returns
/// the number of frames after `since_host_us`, at most `count`.
fn resend(capture: &Capture, since_host_us: u64, count: usize, taken: &TakenFrames) -> usize {
    let frames = capture.frames().unwrap_or_else(|e| {
        tracing::debug!("{e}");
        Vec::new()
    });
    let (before, after): (Vec<_>, Vec<_>) = frames.into_iter().partition(|frame| frame.host_us < since_host_us);
    let times: Vec<_> = before.iter().map(|frame| frame.host_us).collect();
    let maybe_unread = before.iter().skip(first_unread(&times, since_host_us));
    let discarded = after.iter().skip(count).filter(|frame| taken.has_discarded(frame));
    for frame in maybe_unread.chain(&taken.frames).chain(after.iter().take(count)).chain(discarded) {
        if let Err(e) = capture.send(frame) {
            tracing::debug!("a frame could not be sent again: {e}");
        }
    }
    after.len().min(count)
}

/// Returns the index of the first of the frames of `times` that QEMU may not have read at `stop_us`.
fn first_unread(times: &[u64], stop_us: u64) -> usize {
    let since = |lag_us: u64| times.partition_point(|time| time.saturating_add(lag_us) < stop_us);
    let last = times.partition_point(|time| *time < stop_us).saturating_sub(BUSY_FRAMES);
    since(LAG_US).min(since(BUSY_LAG_US).max(last))
}

/// Returns the time of the host's clock in µs since 1970.
fn now_us() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_a_busy_qemu_may_not_have_read_are_sent_again() {
        let stop_us = 10_000_000;
        // Fast: all of the last 2 ms. Slow: the last few. Older ones were read.
        let fast: Vec<u64> = (0..1000).map(|number| stop_us - 10_000 + 10 * number).collect();
        assert_eq!(first_unread(&fast, stop_us), 800);
        let slow: Vec<u64> = (0..100).map(|number| stop_us - 500_000 + 5000 * number).collect();
        assert_eq!(first_unread(&slow, stop_us), 92);
        assert_eq!(first_unread(&[1, stop_us - 400_000, stop_us - 1], stop_us), 1);
        // Those after the stop are all meant.
        assert_eq!(first_unread(&[stop_us - 1, stop_us, stop_us + 1], stop_us), 0);
        assert_eq!(first_unread(&[], stop_us), 0);
    }
}
