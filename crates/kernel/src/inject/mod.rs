//! System calls that another process makes on our behalf.
//!
//! Some operations are possible only inside the process itself: replacing one of its descriptors, opening a userfaultfd
//! for its memory, closing a descriptor. [`Injector`] stops one thread of the process with ptrace for 50 to 100 µs,
//! makes it execute the calls through the `syscall` instruction of its vDSO, and resumes it at the instruction where it
//! stopped.
//!
//! The process can notice only the time that this takes:
//!
//! - **Signals** that arrive meanwhile are delivered, each exactly once, with the thread's own registers. A signal that
//!   arrives before a call is delivered first, and the call is tried again. A signal that arrives during the call waits
//!   until after it.
//! - **System calls that were interrupted** are restarted by the kernel. A call with a time-out restarts with the time
//!   that remains (`restart_block` is unchanged, since an injected call never waits). A few calls are not restarted by
//!   Linux (`epoll_wait`, `semop`, ...: signal(7)). For these, `EINTR` is replaced by `ERESTARTNOHAND`, with which the
//!   kernel restarts the call unless a signal handler runs. Only their time-outs start again from the beginning;
//!   threads in such calls are chosen last.
//! - **Job control**: a thread that is stopped by `SIGSTOP` makes the call and is stopped again.
//! - **seccomp**: a filter may kill the process for a call that it does not permit. The filter is suspended for
//!   injected calls where the kernel permits that (root, `CONFIG_CHECKPOINT_RESTORE`). Otherwise only calls that every
//!   process makes are injected.
//! - **Restartable sequences** (rseq): a thread inside a sequence is resumed and stopped again shortly afterwards.
//!
//! Every step is verified. At entry to and exit from a call, the kernel is queried for the call and the instruction at
//! which the thread has stopped. Every wait has a deadline. On any doubt the thread's own registers are restored, the
//! thread is released, and the call is reported as not done. One wait can exceed its deadline: a thread inside the
//! kernel that cannot be interrupted, since its registers cannot be restored at that point.
//!
//! If the tracing process is killed, the kernel detaches and the thread continues. From the first register written to
//! the last one restored (median 15 µs, ten times that on a busy machine), the thread would continue inside the vDSO
//! with the registers of the injected call. Only a death of the whole tracing process in that interval has this effect,
//! since the tracing thread blocks all signals. `PTRACE_O_EXITKILL` is never set.

mod thread;
mod trace;

use crate::process::Process;
use nix::sys::signal::SigSet;
use std::io;
use std::time::{Duration, Instant};
use trace::{Doubt, Stop, Tracee};

/// Time that one thread may take to stop before another thread is tried. Stopping takes microseconds unless the thread
/// waits for a disk.
const PATIENCE: Duration = Duration::from_millis(250);
/// Total time for trying threads.
const ALL: Duration = Duration::from_secs(30);
/// How many times a thread inside a restartable sequence is resumed and stopped again.
const ROUNDS: u32 = 20;
/// Time limit of one call, including signals and stops that interrupt it. A call takes microseconds, but a busy machine
/// may not schedule the thread.
const CALL: Duration = Duration::from_secs(10);
/// Calls that every process makes, so that a filter under which the process runs at all permits them.
const HARMLESS: [i64; 4] = [libc::SYS_ioctl, libc::SYS_close, libc::SYS_fcntl, libc::SYS_dup3];

/// The reason why a system call could not be injected.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The process has ended.
    #[error("process {pid} has ended")]
    Gone {
        /// Number of the process.
        pid: u32,
    },
    /// We may not trace the process.
    #[error(
        "process {pid} may not be traced: run as root, or as the user of that process with kernel.yama.ptrace_scope=0"
    )]
    Forbidden {
        /// Number of the process.
        pid: u32,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Another process traces it already.
    #[error(
        "process {pid} is traced by process {tracer} ({name}), and Linux allows one tracer only: end that one first"
    )]
    Traced {
        /// Number of the process.
        pid: u32,
        /// Number of the tracing process.
        tracer: u32,
        /// Command name of the tracing process.
        name: String,
    },
    /// The process is not a 64-bit process of x86-64, or has no vDSO.
    #[error("process {pid} cannot be made to do system calls: {why}")]
    Unfit {
        /// Number of the process.
        pid: u32,
        /// The property that is missing.
        why: &'static str,
    },
    /// A seccomp filter might kill the process for the call.
    #[error(
        "process {pid} has a seccomp filter that might end it for `{call}`, and the filter cannot be suspended: run as \
         root on a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    Filtered {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// No thread stopped in time.
    #[error(
        "none of the threads of process {pid} could be stopped within {} ms each: it waits in the kernel (for a disk, or \
         for memory that a pager does not supply)",
        PATIENCE.as_millis()
    )]
    Stuck {
        /// Number of the process.
        pid: u32,
    },
    /// The thread did not reach the call, or did not return from it, in time.
    #[error("`{call}` inside process {pid} was not done within {} s; the process was released as it was", CALL.as_secs())]
    Late {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// The thread stopped at another place than the call.
    #[error(
        "process {pid} stopped elsewhere than at `{call}`, which it was to make: another program changes its system calls; it was \
         released as it was"
    )]
    Elsewhere {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// The call itself failed.
    #[error("`{call}` inside process {pid} failed")]
    Failed {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
        /// The error that the call returned.
        #[source]
        source: io::Error,
    },
    /// ptrace or `/proc` failed unexpectedly.
    #[error("process {pid}: cannot {what}")]
    Trace {
        /// Number of the process.
        pid: u32,
        /// The step that failed.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

impl InjectError {
    /// Returns the error number of the call itself, if the call was made.
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
        let mut all = [0; 6];
        for (to, from) in all.iter_mut().zip(arguments) {
            *to = from;
        }
        Self { name, number, arguments: all }
    }
}

/// Injects system calls into one process. [`Injector::new`] does the slow preparation, before any thread is stopped.
#[derive(Debug, Clone, Copy)]
pub struct Injector {
    process: Process,
    instruction: u64,
}

impl Injector {
    /// Finds the `syscall` instruction in the vDSO of `process`.
    ///
    /// # Errors
    /// [`InjectError::Gone`], [`InjectError::Forbidden`], [`InjectError::Unfit`].
    pub fn new(process: Process) -> Result<Self, InjectError> {
        Ok(Self { process, instruction: thread::syscall_instruction(process)? })
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
        self.run(|session| session.call(call))
    }

    /// Stops a thread of the process once and makes it execute the calls of `work`, in sequence.
    ///
    /// # Errors
    /// [`InjectError`]. Calls before the failed one have been made.
    pub fn run<T: Send>(
        &self,
        work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
    ) -> Result<T, InjectError> {
        // A tracee belongs to the thread that seized it, and the kernel detaches it when that thread ends. A separate
        // tracing thread therefore cannot leave a tracee behind. Each attempt has its own tracing thread: otherwise a
        // tracee that stops too late would stay stopped as long as its tracer runs.
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

    /// Stops thread `tid` and makes it do `work`. Returns `None` if it could not be stopped; it continues to run.
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
                    // Blocks all signals: no handler may run in this thread while the tracee has injected registers.
                    SigSet::all().thread_block().map_err(|e| traced(e.into()))?;
                    let Some(mut session) = self.stop(tid)? else { return Ok(None) };
                    work.take().map(|work| work(&mut session)).transpose()
                })
                .map_err(traced)?
                .join()
                .unwrap_or_else(|_| Err(traced(io::Error::other("it panicked"))))
        })
    }

    /// Stops thread `tid`. Returns `None` if it ended, did not stop, or must not be used now.
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
        // The thread number may have been reused by another process before the seizure. It cannot be reused after it.
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
    /// Whether a seccomp filter is in force for the thread.
    filtered: bool,
}

impl StoppedThread {
    /// Makes the thread execute one call, and returns the call's result.
    ///
    /// # Errors
    /// [`InjectError::Failed`] with the call's own error; [`InjectError::Filtered`] without making the call, or if the
    /// filter trapped it; [`InjectError::Late`], [`InjectError::Elsewhere`] or [`InjectError::Gone`].
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
                // If there is no result, a signal interrupted the call before it had an effect. The signal is delivered
                // first.
                Stop::Call => {
                    if let Some(result) = self.tracee.leave(deadline).map_err(doubted)? {
                        break result;
                    }
                }
                // The thread has its own registers again: it enters the handler, or restarts its call, as without
                // injection.
                Stop::Signal(signal) => {
                    self.tracee.deliver(signal).map_err(failed)?;
                    self.halt_again(failed)?;
                }
                Stop::Trap => {}
            }
        };
        // `SECCOMP_RET_TRAP` leaves the call's number in the register of the result.
        if self.filtered && result == call.number && self.tracee.has_pending(self.injector.process, libc::SIGSYS) {
            return Err(InjectError::Filtered { pid, call: call.name });
        }
        u64::try_from(result).map_err(|_| {
            let number = i32::try_from(-result).unwrap_or(libc::EINVAL);
            InjectError::Failed { pid, call: call.name, source: io::Error::from_raw_os_error(number) }
        })
    }

    /// Stops the thread again after it was resumed to deliver a signal.
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
