//! System calls made by another process, on our behalf.
//!
//! Some things only a process itself can do: put a descriptor in the place of another, open a userfaultfd for its own
//! memory, close one. [`Injector`] stops one of its threads with ptrace for some 50 to 100 µs, lets it make the calls
//! through the `syscall` instruction of its vDSO, and lets it continue where it was.
//!
//! What the process notices: nothing but the time.
//!
//! - **Signals** that come meanwhile are delivered, each once, with the thread's own registers: a signal that comes
//!   before a call is let through first, and the call is tried again; one that comes during it waits until after it.
//! - **System calls that were interrupted** are restarted by the kernel, those with a time-out with what is left of it
//!   (`restart_block` stays as it was, since a call of ours never waits). The few that Linux does not restart
//!   (`epoll_wait`, `semop`, ...: signal(7)) are made to: their `EINTR` is turned into `ERESTARTNOHAND`, with which the
//!   kernel restarts the call unless a signal handler runs. Only a time-out starts again then, and such threads are
//!   taken last.
//! - **Job control**: a thread that is stopped by `SIGSTOP` makes the call and is stopped again.
//! - **seccomp**: a filter may end the process for a call that it does not like. It is suspended for our calls where
//!   the kernel lets us (root, `CONFIG_CHECKPOINT_RESTORE`). Elsewhere only calls that every process makes are made.
//! - **Restartable sequences** (rseq): a thread within one is resumed and stopped again a moment later.
//!
//! Nothing is taken on trust: at both ends of a call the kernel is asked which call at which instruction the thread
//! stands at, and everything has a deadline. On any doubt the thread gets its own registers back and is released, and
//! the call is reported as not done. Only a thread that is within the kernel and cannot be interrupted is waited for,
//! since its registers cannot be restored there.
//!
//! If we are killed, the kernel detaches and the thread continues. Between the first register written and the last one
//! restored (15 µs in the median, ten times that on a busy machine) it would continue within the vDSO with the
//! registers of our call: only a death of our whole process at that very moment does that, since the thread that
//! makes the call has all signals blocked. `PTRACE_O_EXITKILL` is never set.

mod thread;
mod trace;

use crate::process::Process;
use nix::sys::signal::SigSet;
use std::io;
use std::time::{Duration, Instant};
use trace::{Doubt, Stop, Tracee};

/// How long one thread may take to stop before another one is tried. It takes microseconds, unless the thread waits
/// for a disk.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long all threads together are tried.
const ALL: Duration = Duration::from_secs(30);
/// How often a thread that is within a restartable sequence is stopped again.
const ROUNDS: u32 = 20;
/// How long one call may take with all that comes in between. It takes microseconds; a machine that is busy may not
/// let the thread run.
const CALL: Duration = Duration::from_secs(10);
/// Calls that any process makes under any filter that it can live with.
const HARMLESS: [i64; 4] = [libc::SYS_ioctl, libc::SYS_close, libc::SYS_fcntl, libc::SYS_dup3];

/// Why another process could not be made to do a system call.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// It has ended.
    #[error("process {pid} has ended")]
    Gone {
        /// The process.
        pid: u32,
    },
    /// We may not trace it.
    #[error(
        "process {pid} may not be traced: run as root, or as the user of that process with kernel.yama.ptrace_scope=0"
    )]
    Forbidden {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another tracer has it.
    #[error(
        "process {pid} is traced by process {tracer} ({name}), and Linux allows one tracer only: end that one first"
    )]
    Traced {
        /// The process.
        pid: u32,
        /// Its tracer.
        tracer: u32,
        /// The tracer's command.
        name: String,
    },
    /// Not a 64-bit process of x86-64, or one without vDSO.
    #[error("process {pid} cannot be made to do system calls: {why}")]
    Unfit {
        /// The process.
        pid: u32,
        /// What is missing.
        why: &'static str,
    },
    /// A seccomp filter might end it for the call.
    #[error(
        "process {pid} has a seccomp filter that might end it for `{call}`, and the filter cannot be suspended: run as \
         root on a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    Filtered {
        /// The process.
        pid: u32,
        /// The call.
        call: &'static str,
    },
    /// No thread stopped.
    #[error(
        "none of the threads of process {pid} could be stopped within {} ms each: it waits in the kernel (for a disk, or \
         for memory that a pager does not supply)",
        PATIENCE.as_millis()
    )]
    Stuck {
        /// The process.
        pid: u32,
    },
    /// The thread did not come to the call, or did not return from it, in time.
    #[error("`{call}` inside process {pid} was not done within {} s; the process was released as it was", CALL.as_secs())]
    Late {
        /// The process.
        pid: u32,
        /// The call.
        call: &'static str,
    },
    /// The thread stopped elsewhere than at the call.
    #[error(
        "process {pid} stopped elsewhere than at `{call}`, which it was to make: another program changes its system calls; it was \
         released as it was"
    )]
    Elsewhere {
        /// The process.
        pid: u32,
        /// The call.
        call: &'static str,
    },
    /// The call itself failed.
    #[error("`{call}` inside process {pid} failed")]
    Failed {
        /// The process.
        pid: u32,
        /// The call.
        call: &'static str,
        /// How.
        #[source]
        source: io::Error,
    },
    /// ptrace or `/proc` failed in a way that should not be.
    #[error("process {pid}: cannot {what}")]
    Trace {
        /// The process.
        pid: u32,
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl InjectError {
    /// The error number that the call itself gave, if it came that far.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Failed { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

impl From<InjectError> for io::Error {
    fn from(e: InjectError) -> Self {
        let kind = match &e {
            InjectError::Gone { .. } => io::ErrorKind::NotFound,
            InjectError::Forbidden { .. } | InjectError::Traced { .. } => io::ErrorKind::PermissionDenied,
            InjectError::Unfit { .. } | InjectError::Filtered { .. } => io::ErrorKind::Unsupported,
            InjectError::Stuck { .. } | InjectError::Late { .. } => io::ErrorKind::TimedOut,
            InjectError::Elsewhere { .. } => io::ErrorKind::Other,
            InjectError::Failed { source, .. } | InjectError::Trace { source, .. } => source.kind(),
        };
        io::Error::new(kind, e)
    }
}

/// A system call to be made by another process.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    name: &'static str,
    number: i64,
    arguments: [u64; 6],
}

impl Call {
    /// Calls `number` (as `libc::SYS_*`), called `name` in errors, with up to six arguments.
    ///
    /// It must not wait: a call that does not return keeps the thread, and a call that sets a `restart_block` breaks
    /// the call that was interrupted. Addresses among the arguments are addresses of the other process.
    #[must_use]
    pub fn new<const N: usize>(name: &'static str, number: i64, arguments: [u64; N]) -> Self {
        const { assert!(N <= 6) };
        let mut all = [0; 6];
        for (to, from) in all.iter_mut().zip(arguments) {
            *to = from;
        }
        Self { name, number, arguments: all }
    }
}

/// Lets a process do system calls. What takes time is done beforehand.
#[derive(Debug, Clone, Copy)]
pub struct Injector {
    process: Process,
    instruction: u64,
}

impl Injector {
    /// Prepares for `process`: finds the `syscall` instruction of its vDSO.
    ///
    /// # Errors
    /// [`InjectError::Gone`], [`InjectError::Forbidden`], [`InjectError::Unfit`].
    pub fn new(process: Process) -> Result<Self, InjectError> {
        Ok(Self { process, instruction: thread::syscall_instruction(process)? })
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Lets the process make one call, and returns what it returns.
    ///
    /// # Errors
    /// [`InjectError`]; the process continues unchanged.
    pub fn call(&self, call: Call) -> Result<u64, InjectError> {
        self.run(|session| session.call(call))
    }

    /// Stops a thread of the process once and lets it make the calls of `work`, one after the other.
    ///
    /// # Errors
    /// [`InjectError`]; calls that were made before the error have been made.
    pub fn run<T: Send>(
        &self,
        work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
    ) -> Result<T, InjectError> {
        // ptrace belongs to a thread: a thread of its own cannot leave a tracee behind, because when it ends the kernel
        // detaches.
        // One for each thread that is tried: one that stops too late would stay stopped as long as its tracer lives.
        let deadline = Instant::now() + ALL;
        let mut work = Some(work);
        loop {
            for tid in thread::candidates(self.process)? {
                if let Some(done) = self.run_in(tid, &mut work)? {
                    return Ok(done);
                }
                if Instant::now() > deadline {
                    return Err(InjectError::Stuck { pid: self.process.pid });
                }
            }
            if !self.process.is_alive() {
                return Err(InjectError::Gone { pid: self.process.pid });
            }
        }
    }

    /// Stops thread `tid` and lets it do `work`. `None`: it could not be stopped, and runs.
    fn run_in<T: Send>(
        &self,
        tid: i32,
        work: &mut Option<impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send>,
    ) -> Result<Option<T>, InjectError> {
        let traced = |source| InjectError::Trace { pid: self.process.pid, what: "start a tracing thread", source };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("inject".into())
                .spawn_scoped(scope, || {
                    // No handler of ours may run while the registers of the other process are ours.
                    SigSet::all().thread_block().map_err(|e| traced(e.into()))?;
                    let Some(mut session) = self.stop(tid)? else { return Ok(None) };
                    work.take().map(|work| work(&mut session)).transpose()
                })
                .map_err(traced)?
                .join()
                .unwrap_or_else(|_| Err(traced(io::Error::other("it panicked"))))
        })
    }

    /// Stops thread `tid`. `None`: it ended, or does not stop, or is not to be used now.
    fn stop(&self, tid: i32) -> Result<Option<StoppedThread>, InjectError> {
        let pid = self.process.pid;
        let Ok(filtered) = thread::is_filtered(self.process, tid) else { return Ok(None) };
        let mut suspended = false;
        let seized = if filtered {
            suspended = true;
            Tracee::seize(tid, libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP).or_else(|_| {
                suspended = false;
                Tracee::seize(tid, libc::PTRACE_O_TRACESYSGOOD)
            })
        } else {
            Tracee::seize(tid, libc::PTRACE_O_TRACESYSGOOD)
        };
        let mut tracee = match seized {
            Ok(tracee) => tracee,
            Err(_) if thread::is_ending(self.process, tid) => return Ok(None),
            Err(source) => {
                return Err(match thread::tracer(self.process, tid) {
                    Some((tracer, name)) => InjectError::Traced { pid, tracer, name },
                    None => InjectError::Forbidden { pid, source },
                });
            }
        };
        // The number may have passed to another process before it was seized; from here on it cannot.
        if !thread::belongs(self.process, tid) {
            return Ok(None);
        }
        match tracee.halt(Instant::now() + PATIENCE) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            Err(source) => return Err(InjectError::Trace { pid, what: "stop it", source }),
        }
        if !tracee.is_64_bit() {
            return Err(InjectError::Unfit { pid, why: "it is not a 64-bit process" });
        }
        if tracee.in_restartable_sequence(self.process) {
            return Ok(None);
        }
        Ok(Some(StoppedThread { injector: *self, tracee, filtered: filtered && !suspended }))
    }
}

/// A thread of the other process, stopped and ready to make calls.
#[derive(Debug)]
pub struct StoppedThread {
    injector: Injector,
    tracee: Tracee,
    /// A seccomp filter is in force.
    filtered: bool,
}

impl StoppedThread {
    /// Lets the thread make one call, and returns what it returns.
    ///
    /// # Errors
    /// [`InjectError::Failed`] with the call's own error; [`InjectError::Filtered`]; [`InjectError::Gone`].
    pub fn call(&mut self, call: Call) -> Result<u64, InjectError> {
        let pid = self.injector.process.pid;
        if self.filtered && !HARMLESS.contains(&call.number) {
            return Err(InjectError::Filtered { pid, call: call.name });
        }
        let what = "let it make a system call";
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::ESRCH) => InjectError::Gone { pid },
            _ => InjectError::Trace { pid, what, source },
        };
        let doubted = |doubt: Doubt| match doubt {
            Doubt::Late => InjectError::Late { pid, call: call.name },
            Doubt::Elsewhere => InjectError::Elsewhere { pid, call: call.name },
            Doubt::Failed(source) => failed(source),
        };
        let deadline = Instant::now() + CALL;
        let result = loop {
            if Instant::now() > deadline {
                return Err(InjectError::Late { pid, call: call.name });
            }
            let entered = self.tracee.enter(self.injector.instruction, call.number, call.arguments, deadline);
            match entered.map_err(doubted)? {
                // A signal has interrupted it before it did anything; it is delivered first.
                Stop::Call => {
                    if let Some(result) = self.tracee.leave(deadline).map_err(doubted)? {
                        break result;
                    }
                }
                // The thread has its own registers again: the handler is entered, or the call restarted, as without us.
                Stop::Signal(signal) => {
                    self.tracee.deliver(signal).map_err(failed)?;
                    self.halt_again(failed)?;
                }
                Stop::Trap => {}
            }
        };
        // SECCOMP_RET_TRAP leaves the number where the result would be.
        if self.filtered && result == call.number && self.tracee.has_pending(self.injector.process, libc::SIGSYS) {
            return Err(InjectError::Filtered { pid, call: call.name });
        }
        u64::try_from(result).map_err(|_| {
            let number = i32::try_from(-result).unwrap_or(libc::EINVAL);
            InjectError::Failed { pid, call: call.name, source: io::Error::from_raw_os_error(number) }
        })
    }

    /// Stops the thread again after it was resumed for a moment.
    fn halt_again(&mut self, failed: impl Fn(io::Error) -> InjectError) -> Result<(), InjectError> {
        for _ in 0..ROUNDS {
            if !self.tracee.halt(Instant::now() + PATIENCE).map_err(&failed)? {
                break;
            }
            if !self.tracee.in_restartable_sequence(self.injector.process) {
                return Ok(());
            }
            self.tracee.resume().map_err(&failed)?;
        }
        Err(InjectError::Stuck { pid: self.injector.process.pid })
    }
}

#[cfg(test)]
mod tests;
