//! System calls that another process makes on our behalf.
//!
//! **Problem.** Some operations are possible only inside the process itself: replacing one of its descriptors, opening a
//! userfaultfd for its memory, closing a descriptor. [`Injector`] stops one thread of the process with ptrace for 50 to
//! 100 µs, makes it execute the calls through a `syscall; ret` of its C library, and resumes it at the instruction where
//! it stopped.
//!
//! **Promise.** The process can notice only the time that this takes. Threads in these states need care:
//!
//! | state of the thread | what happens |
//! |---|---|
//! | a signal arrives before the call | it is delivered with the thread's own registers, and the call is tried again |
//! | a signal arrives during the call | it is delivered once, after the call, with the thread's own registers |
//! | in a system call | the kernel restarts it. A time-out continues with the time that remains: `restart_block` is unchanged, since an injected call never waits |
//! | in a call that Linux does not restart (`epoll_wait`, `semop`, ...: signal(7)) | its `EINTR` is replaced by `ERESTARTNOHAND`, with which the kernel restarts it unless a signal handler runs. Its time-out starts again, so such a thread is chosen last |
//! | stopped by `SIGSTOP` | it makes the call and is stopped again when the injection returns |
//! | with a seccomp filter, which may kill it for the call | the filter is suspended where the kernel permits that (root without a filter of its own, `CONFIG_CHECKPOINT_RESTORE`); otherwise only calls that every process makes are injected |
//! | inside a restartable sequence (rseq) | it is resumed and stopped again shortly afterwards |
//! | a worker of the kernel (vhost, io_uring, KVM), which cannot be traced | it is not chosen |
//! | its stack has no room for a signal frame (3 KiB; with AMX 12 KiB) | it is not chosen |
//!
//! Processes with shadow stacks and processes without a C library are rejected. `PTRACE_O_EXITKILL` is never set.
//!
//! Every step is verified. At entry to and exit from a call, the kernel is queried for the call and the instruction at
//! which the thread has stopped. Every wait has a deadline. On any doubt the thread's own registers are restored, the
//! thread is released, and the call is reported as not done. One wait can exceed its deadline: a thread inside the
//! kernel that cannot be interrupted, since its registers cannot be restored at that point.
//!
//! # If the tracing process is killed
//!
//! The kernel detaches, and the thread continues with the registers that it has. If they are those of an injected call,
//! the thread makes the call, and then restores its own registers from a signal frame on its stack (`frame.rs`): it
//! continues as after a signal handler. What the process can notice in addition:
//!
//! - An interrupted call is made again from the beginning, with its whole time-out. If it had been interrupted before,
//!   only the kernel knows which call it was: it returns `EINTR`.
//! - A signal handler that runs before the frame is used does not end an interrupted call.
//! - A seccomp filter is no longer suspended. It checks the injected call if the thread has not entered it yet. QEMU's
//!   own filter (`-sandbox`) denies none of the calls that we inject.
//! - A tracer that dies between the stop of a thread and its first request to it leaves the `EINTR` of the calls that
//!   Linux does not restart, as after `SIGSTOP` and `SIGCONT`.

mod error;
mod frame;
mod gadgets;
mod thread;
mod trace;

pub use error::InjectError;

use crate::process::Process;
use gadgets::Gadgets;
use nix::sys::signal::SigSet;
use std::io;
use std::time::{Duration, Instant};
use trace::{Cancelled, EntryStop, Tracee};

/// Time that one thread may take to stop before another thread is tried. Stopping takes microseconds unless the thread
/// waits for a disk.
const STOP_TIMEOUT: Duration = Duration::from_millis(250);
/// Total time for trying threads.
const STOP_TIMEOUT_OF_ALL_THREADS: Duration = Duration::from_secs(30);
/// Time that a process stopped by a signal may take to be stopped again after an injection. It takes microseconds.
const RESTOP_TIMEOUT: Duration = Duration::from_secs(10);
const RESTOP_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How many times a thread that stops inside a restartable sequence is resumed and stopped again.
const MAX_SEQUENCE_STOPS: u32 = 20;
/// Time limit of one call, including signals and stops that interrupt it. A call takes microseconds, but a busy machine
/// may not schedule the thread.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls that every process makes, so that a filter under which the process runs at all permits them.
const CALLS_OF_EVERY_PROCESS: [i64; 4] = [libc::SYS_ioctl, libc::SYS_close, libc::SYS_fcntl, libc::SYS_dup3];

/// A system call that another process is to make.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    name: &'static str,
    number: i64,
    arguments: [u64; 6],
}

impl Call {
    /// Describes call `number` (as `libc::SYS_*`), which errors name as `name`, with up to six arguments.
    ///
    /// The call must not wait: the thread stays stopped until it returns, and a call that sets a `restart_block` breaks
    /// the restart of the call that was interrupted. Pointers in the arguments are addresses of the other process.
    #[must_use]
    pub fn new<const N: usize>(name: &'static str, number: i64, arguments: [u64; N]) -> Self {
        const { assert!(N <= 6) };
        let mut registers = [0; 6];
        for (register, argument) in registers.iter_mut().zip(arguments) {
            *register = argument;
        }
        Self { name, number, arguments: registers }
    }
}

/// Injects system calls into one process. [`Injector::new`] does the slow preparation, before any thread is stopped.
#[derive(Debug, Clone, Copy)]
pub struct Injector {
    process: Process,
    gadgets: Gadgets,
}

impl Injector {
    /// Finds the instructions through which `process` will make the calls.
    ///
    /// # Errors
    /// [`InjectError::Gone`], [`InjectError::Forbidden`], or [`InjectError::Unfit`] if it could not survive the death
    /// of the tracer.
    pub fn new(process: Process) -> Result<Self, InjectError> {
        Ok(Self { process, gadgets: gadgets::find(process)? })
    }

    /// Returns the process into which calls are injected.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Makes the process execute one call, and returns the call's result.
    ///
    /// # Errors
    /// [`InjectError`]; the process continues unchanged.
    pub fn call(&self, call: Call) -> Result<u64, InjectError> {
        self.run(|stopped_thread| stopped_thread.call(call))
    }

    /// Stops a thread of the process once and makes it execute the calls of `work`, in sequence.
    ///
    /// # Errors
    /// [`InjectError`]. Calls before the failed one have been made.
    pub fn run<T: Send>(
        &self,
        work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
    ) -> Result<T, InjectError> {
        let was_stopped = self.process.is_stopped();
        let result = self.run_in_any_thread(work);
        if was_stopped {
            self.await_stop();
        }
        result
    }

    /// Waits until the process is stopped again, as it was before. The kernel resumes a thread when it detaches it, and stops it
    /// again before it leaves the kernel. Returns after [`RESTOP_TIMEOUT`] if another program has continued the process.
    fn await_stop(&self) {
        let deadline = Instant::now() + RESTOP_TIMEOUT;
        while !self.process.is_stopped() && self.process.is_alive() && Instant::now() < deadline {
            std::thread::sleep(RESTOP_POLL_INTERVAL);
        }
    }

    fn run_in_any_thread<T: Send>(
        &self,
        work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
    ) -> Result<T, InjectError> {
        // A tracee belongs to the thread that seized it, and the kernel detaches it when that thread ends. A separate
        // tracing thread therefore cannot leave a tracee behind. Each attempt has its own tracing thread: otherwise a
        // tracee that stops too late would stay stopped as long as its tracer runs.
        let deadline = Instant::now() + STOP_TIMEOUT_OF_ALL_THREADS;
        let mut work = Some(work);
        loop {
            for tid in thread::candidates(self.process)? {
                if let Some(result) = self.run_in(tid, &mut work)? {
                    return Ok(result);
                }
                if Instant::now() > deadline {
                    break;
                }
            }
            if !self.process.is_alive() {
                return Err(InjectError::Gone { pid: self.process.pid });
            }
            if Instant::now() > deadline {
                return Err(InjectError::Stuck { pid: self.process.pid });
            }
        }
    }

    /// Stops thread `tid` and makes it do `work`. Returns `None` if it could not be stopped; it continues to run.
    fn run_in<T: Send>(
        &self,
        tid: i32,
        work: &mut Option<impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send>,
    ) -> Result<Option<T>, InjectError> {
        let failed = |source| InjectError::Trace { pid: self.process.pid, what: "start a tracing thread", source };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("inject".into())
                .spawn_scoped(scope, || {
                    // Blocks all signals: no handler may run in this thread while the tracee has injected registers.
                    SigSet::all().thread_block().map_err(|e| failed(e.into()))?;
                    let Some(mut stopped_thread) = self.stop(tid)? else { return Ok(None) };
                    work.take().map(|work| work(&mut stopped_thread)).transpose()
                })
                .map_err(failed)?
                .join()
                .unwrap_or_else(|_| Err(failed(io::Error::other("it panicked"))))
        })
    }

    /// Stops thread `tid`. Returns `None` if it ended, did not stop, or must not be used now.
    fn stop(&self, tid: i32) -> Result<Option<StoppedThread>, InjectError> {
        let pid = self.process.pid;
        let Some((mut tracee, is_filtered)) = self.seize(tid)? else { return Ok(None) };
        // The thread number may have been reused by another process before the seizure. It cannot be reused after it.
        if !thread::is_thread_of(self.process, tid) {
            return Ok(None);
        }
        let is_done = |step: io::Result<bool>, what| match step {
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            step => step.map_err(|source| InjectError::Trace { pid, what, source }),
        };
        if !is_done(tracee.halt(Instant::now() + STOP_TIMEOUT), "stop it")? {
            return Ok(None);
        }
        if !tracee.is_64_bit() {
            return Err(InjectError::Unfit { pid, why: "it is not a 64-bit process" });
        }
        if tracee.in_restartable_sequence(self.process) {
            return Ok(None);
        }
        let is_prepared = tracee.prepare_return(self.process, self.gadgets.restorer);
        if !is_done(is_prepared, "write a signal frame to its stack")? {
            return Ok(None);
        }
        Ok(Some(StoppedThread { injector: *self, tracee, is_filtered }))
    }

    /// Becomes the tracer of thread `tid`, and suspends its seccomp filter if there is one. Returns the thread, and
    /// whether a filter remains in force because it could not be suspended; `None` if the thread has ended.
    fn seize(&self, tid: i32) -> Result<Option<(Tracee, bool)>, InjectError> {
        const OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD;
        let pid = self.process.pid;
        let Ok(has_filter) = thread::has_filter(self.process, tid) else { return Ok(None) };
        if has_filter && let Ok(tracee) = Tracee::seize(tid, OPTIONS | libc::PTRACE_O_SUSPEND_SECCOMP) {
            return Ok(Some((tracee, false)));
        }
        match Tracee::seize(tid, OPTIONS) {
            Ok(tracee) => Ok(Some((tracee, has_filter))),
            Err(_) if thread::is_ending(self.process, tid) => Ok(None),
            Err(source) => Err(match thread::tracer_of(self.process, tid) {
                Some(tracer) => InjectError::Traced { pid, tracer: tracer.pid, name: tracer.name },
                None => InjectError::Forbidden { pid, source },
            }),
        }
    }
}

/// A thread of the other process, stopped and ready to make calls.
#[derive(Debug)]
pub struct StoppedThread {
    injector: Injector,
    tracee: Tracee,
    /// Whether a seccomp filter is in force for the thread.
    is_filtered: bool,
}

impl StoppedThread {
    /// Makes the thread execute one call, and returns the call's result.
    ///
    /// # Errors
    /// [`InjectError::Failed`] with the call's own error; [`InjectError::Filtered`] without making the call, or if the
    /// filter trapped it; [`InjectError::Late`], [`InjectError::Elsewhere`] or [`InjectError::Gone`].
    pub fn call(&mut self, call: Call) -> Result<u64, InjectError> {
        let pid = self.injector.process.pid;
        if self.is_filtered && !CALLS_OF_EVERY_PROCESS.contains(&call.number) {
            return Err(InjectError::Filtered { pid, call: call.name });
        }
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::ESRCH) => InjectError::Gone { pid },
            _ => InjectError::Trace { pid, what: "let it make a system call", source },
        };
        let cancelled = |reason: Cancelled| match reason {
            Cancelled::Late => InjectError::Late { pid, call: call.name },
            Cancelled::Elsewhere => InjectError::Elsewhere { pid, call: call.name },
            Cancelled::Failed(source) => failed(source),
        };
        let deadline = Instant::now() + CALL_TIMEOUT;
        let result = loop {
            if Instant::now() > deadline {
                return Err(InjectError::Late { pid, call: call.name });
            }
            let entered = self.tracee.enter_call(self.injector.gadgets.call_and_return, call, deadline);
            match entered.map_err(cancelled)? {
                // If there is no result, a signal interrupted the call before it had an effect. The signal is delivered
                // first.
                EntryStop::AtCall => {
                    if let Some(result) = self.tracee.finish_call(deadline).map_err(cancelled)? {
                        break result;
                    }
                }
                // The thread has its own registers again: it enters the handler, or restarts its call, as without
                // injection.
                EntryStop::Signal(signal) => {
                    self.tracee.deliver(signal).map_err(failed)?;
                    self.halt_again(failed)?;
                }
                EntryStop::JobControl => {}
            }
        };
        // `SECCOMP_RET_TRAP` leaves the call's number in the register of the result.
        if self.is_filtered && result == call.number && self.tracee.has_pending(self.injector.process, libc::SIGSYS) {
            return Err(InjectError::Filtered { pid, call: call.name });
        }
        u64::try_from(result).map_err(|_| {
            let number = i32::try_from(-result).unwrap_or(libc::EINVAL);
            InjectError::Failed { pid, call: call.name, source: io::Error::from_raw_os_error(number) }
        })
    }

    /// Stops the thread again after it was resumed to deliver a signal.
    fn halt_again(&mut self, failed: impl Fn(io::Error) -> InjectError) -> Result<(), InjectError> {
        for _ in 0..MAX_SEQUENCE_STOPS {
            if !self.tracee.halt(Instant::now() + STOP_TIMEOUT).map_err(&failed)? {
                break;
            }
            let Injector { process, gadgets } = self.injector;
            if !self.tracee.in_restartable_sequence(process)
                && self.tracee.prepare_return(process, gadgets.restorer).map_err(&failed)?
            {
                return Ok(());
            }
            self.tracee.resume().map_err(&failed)?;
        }
        Err(InjectError::Stuck { pid: self.injector.process.pid })
    }
}

#[cfg(test)]
mod tests;
