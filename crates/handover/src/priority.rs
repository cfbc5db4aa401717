//! Raises the scheduling priority of the threads that a stopped guest waits for. Without it they would wait for other
//! guests, and for other work of the two QEMUs.

use rekindle_kernel::process::Process;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_qemu::vmm::Vmm;
use std::io;

/// Raises the priority of the calling thread, which hands over a guest. Without effect if it has no privilege to do so:
/// then the hand-over takes longer.
#[must_use]
pub fn boost_this_thread() -> PriorityBoost {
    let mut boost = PriorityBoost::default();
    let _ = boost.this_thread();
    boost
}

/// Raises the priority of the threads of both QEMUs that the stopped guest waits for. Without effect where it fails.
#[must_use]
pub fn boost_hand_over(source: Option<&Vmm>, destination: &Vmm) -> PriorityBoost {
    let mut boost = PriorityBoost::default();
    let boosted = source
        .map_or(Ok(()), |source| boost_monitor(&mut boost, source.process()))
        .and_then(|()| boost_monitor_and_processors(&mut boost, destination.process()));
    if let Err(e) = boosted {
        tracing::debug!("cannot raise the priority of the hand-over: {e}");
    }
    boost
}

/// Raises the priority of the source's virtual processors above everything but the threads of [`boost_monitor`]: they
/// must be scheduled on a host processor to be stopped. Without effect where it fails.
///
/// Keep this boost only until the processors have stopped: if this process is killed before that, they preempt all
/// other threads until `rekindle recover` runs.
#[must_use]
pub fn boost_stopping_processors(source: Option<&Vmm>) -> PriorityBoost {
    let mut boost = PriorityBoost::default();
    if let Some(source) = source {
        let _ = boost.threads_of(source.process(), |thread| is_processor(thread).then_some(Rank::Second));
    }
    boost
}

/// Raises the priority of the main and monitor threads of a QEMU, which save and load its state.
///
/// # Errors
/// The errors of [`PriorityBoost::threads_of`].
pub fn boost_monitor(boost: &mut PriorityBoost, qemu: Process) -> io::Result<()> {
    boost.threads_of(qemu, monitor_rank)
}

/// Raises the priority of the threads of [`boost_monitor`] and, to a lower rank, of the virtual processors, which load
/// their registers.
///
/// # Errors
/// The errors of [`PriorityBoost::threads_of`].
pub fn boost_monitor_and_processors(boost: &mut PriorityBoost, qemu: Process) -> io::Result<()> {
    boost.threads_of(qemu, |thread| monitor_rank(thread).or_else(|| is_processor(thread).then_some(Rank::Third)))
}

/// Returns the rank of a main or monitor thread, by the thread's name.
fn monitor_rank(thread: &str) -> Option<Rank> {
    [sched::MAIN, "IO mon_iothread"].contains(&thread).then_some(Rank::First)
}

/// Returns whether a thread of this name is a virtual processor.
fn is_processor(thread: &str) -> bool {
    thread.starts_with("CPU ")
}
