//! The scheduling of the threads that a stopped guest waits for. Without a raised priority they would wait for other
//! guests, and for other work of the two QEMUs.

use rekindle_kernel::process::Process;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use std::io;

/// Raises the priority of the main and monitor threads of a QEMU, which save and load its state.
///
/// # Errors
/// As [`PriorityBoost::threads_of`].
pub fn boost_monitor(boost: &mut PriorityBoost, qemu: Process) -> io::Result<()> {
    boost.threads_of(qemu, rank_of_monitor)
}

/// As [`boost_monitor`], and to a lower rank the virtual processors, which load their registers.
///
/// # Errors
/// As [`PriorityBoost::threads_of`].
pub fn boost_monitor_and_processors(boost: &mut PriorityBoost, qemu: Process) -> io::Result<()> {
    boost.threads_of(qemu, |thread| rank_of_monitor(thread).or_else(|| is_processor(thread).then_some(Rank::Third)))
}

/// Raises the priority of the virtual processors above everything but the threads of [`boost_monitor`]: they must be
/// scheduled on a host processor to be stopped.
///
/// Only for that moment: if this process were killed during it, they would preempt all other threads until `recover`.
///
/// # Errors
/// As [`PriorityBoost::threads_of`].
pub fn boost_stopping_processors(boost: &mut PriorityBoost, qemu: Process) -> io::Result<()> {
    boost.threads_of(qemu, |thread| is_processor(thread).then_some(Rank::Second))
}

fn rank_of_monitor(thread: &str) -> Option<Rank> {
    [sched::MAIN, "IO mon_iothread"].contains(&thread).then_some(Rank::First)
}

fn is_processor(thread: &str) -> bool {
    thread.starts_with("CPU ")
}
