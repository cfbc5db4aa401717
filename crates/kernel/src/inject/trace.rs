//! One thread under ptrace: stopped, with registers that are its own (*home*) or ours (*away*).

use crate::memory;
use crate::process::Process;
use libc::{c_int, c_long, c_uint, c_void, user_regs_struct};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ptr::{null_mut, without_provenance_mut};
use std::thread;
use std::time::{Duration, Instant};

/// "Restart the system call unless a signal handler runs" (`linux/errno.h`; never seen by a program).
const ERESTARTNOHAND: i64 = 514;
/// The errors by which the kernel has a system call restarted (`linux/errno.h`): the call has not been done.
const RESTART: [i64; 4] = [-512, -513, -514, -516];
/// The code segment of a 64-bit program.
const USER64_CS: u64 = 0x33;
/// How long a stop is awaited by asking again and again, before sleeping in between.
const SPIN: Duration = Duration::from_micros(300);
const NAP: Duration = Duration::from_micros(50);

/// What stopped a thread that was on its way into a system call of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// It is about to do the call.
    Call,
    /// A signal is about to be delivered; the thread has its own registers again.
    Signal(c_int),
    /// Job control; the registers are still ours.
    Trap,
}

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    pointer: u64,
    size: u32,
    signature: u32,
    flags: u32,
    pad: u32,
}

/// The part of `struct ptrace_syscall_info` that is used.
#[repr(C)]
#[derive(Debug, Default)]
struct SystemCall {
    /// Which end of a system call this is.
    op: u8,
    pad: [u8; 3],
    arch: u32,
    instruction: u64,
    stack: u64,
    /// At its beginning: the number and the arguments. At its end: the result.
    data: [u64; 8],
}

const PTRACE_GET_SYSCALL_INFO: c_uint = 0x420e;
const OP_ENTRY: u8 = 1;
const OP_EXIT: u8 = 2;
const _: () = assert!(size_of::<SystemCall>() == 88);
/// Length of the `syscall` instruction.
const INSTRUCTION: u64 = 2;

const PTRACE_GET_RSEQ_CONFIGURATION: c_uint = 0x420f;
const _: () = assert!(size_of::<RseqConfiguration>() == 24);
const _: () = assert!(size_of::<user_regs_struct>() == 27 * 8);

/// Why a call was cancelled. The thread has its own registers.
#[derive(Debug)]
pub(super) enum Doubt {
    /// It was not where it should have been by the deadline.
    Late,
    /// It stopped elsewhere than at the call that was set up.
    Elsewhere,
    /// ptrace failed.
    Failed(io::Error),
}

impl From<io::Error> for Doubt {
    fn from(e: io::Error) -> Self {
        Self::Failed(e)
    }
}

/// A call as it is set up.
#[derive(Debug, Clone, Copy)]
struct SetUp {
    instruction: u64,
    number: c_long,
    arguments: [u64; 6],
}

/// A seized thread. Dropped, it has its registers back and continues.
#[derive(Debug)]
pub(super) struct Tracee {
    tid: c_int,
    /// The thread's own registers, while it is stopped.
    home: Option<user_regs_struct>,
    /// Its registers are ours.
    away: bool,
    /// It is stopped at the beginning of a system call, which the kernel does with whatever registers it has when it
    /// continues.
    at_entry: bool,
    /// The call that was set up last.
    set_up: Option<SetUp>,
    /// A signal that it is stopped for, and that is delivered when it is released.
    signal: c_int,
}

impl Tracee {
    /// Becomes the tracer of thread `tid`, with these options. It runs on.
    pub(super) fn seize(tid: c_int, options: c_int) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, options as usize)?;
        Ok(Self { tid, home: None, away: false, at_entry: false, set_up: None, signal: 0 })
    }

    /// Stops it with its own registers, wherever it is. `false`: it did not stop by the deadline.
    ///
    /// Signals that come first are delivered.
    pub(super) fn halt(&mut self, deadline: Instant) -> io::Result<bool> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        loop {
            let Some(stopped) = wait(self.tid, Some(deadline))? else { return Ok(false) };
            if stopped.event == libc::PTRACE_EVENT_STOP {
                break;
            }
            // A signal is about to be delivered: with the registers as they are, it is what it would have been.
            let mut registers = self.registers()?;
            if let Some(changed) = restartable(&mut registers) {
                self.set_registers(changed)?;
            }
            ptrace(libc::PTRACE_CONT, self.tid, 0, stopped.signal as usize)?;
        }
        let mut registers = self.registers()?;
        restartable(&mut registers);
        self.home = Some(registers);
        Ok(true)
    }

    /// Whether it runs 64-bit code.
    pub(super) fn is_64_bit(&self) -> bool {
        self.home.is_some_and(|registers| registers.cs == USER64_CS)
    }

    /// Whether it is within a restartable sequence. The kernel would forget that it must be aborted if the thread did
    /// something else in between.
    pub(super) fn in_restartable_sequence(&self, process: Process) -> bool {
        let Some(home) = self.home else { return false };
        let mut configuration = RseqConfiguration::default();
        // SAFETY: the kernel writes at most the given size to the address, and both are those of `configuration`.
        let got = unsafe {
            libc::ptrace(
                PTRACE_GET_RSEQ_CONFIGURATION,
                self.tid,
                size_of::<RseqConfiguration>(),
                (&raw mut configuration).cast::<c_void>(),
            )
        };
        // Not known to this kernel, or not used by the thread.
        if got < 0 || configuration.pointer == 0 {
            return false;
        }
        let word = |address: u64| {
            let mut bytes = [0; 8];
            memory::read(process, address, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // `struct rseq`: `rseq_cs` at 8. `struct rseq_cs`: `start_ip` at 8, `post_commit_offset` at 16.
        let section = word(configuration.pointer + 8).filter(|&section| section != 0);
        let Some(section) = section else { return false };
        match (word(section + 8), word(section + 16)) {
            (Some(start), Some(length)) => home.rip.wrapping_sub(start) < length,
            _ => true,
        }
    }

    /// Sends it into system call `number`, through the instruction at `instruction`.
    pub(super) fn enter(
        &mut self,
        instruction: u64,
        number: c_long,
        arguments: [u64; 6],
        deadline: Instant,
    ) -> Result<Stop, Doubt> {
        let Some(home) = self.home else { return Err(Doubt::Failed(io::ErrorKind::InvalidInput.into())) };
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        // No system call is under way (`orig_rax`): keeps the kernel from restarting one with our registers.
        let ours = user_regs_struct {
            rip: instruction,
            rax: number as u64,
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..home
        };
        self.set_up = Some(SetUp { instruction, number, arguments });
        self.away = true;
        self.set_registers(&ours)?;
        ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
        let Some(stopped) = wait(self.tid, Some(deadline))? else {
            self.recall()?;
            return Err(Doubt::Late);
        };
        if stopped.is_system_call() {
            self.at_entry = true;
            if self.is_at(OP_ENTRY)? {
                return Ok(Stop::Call);
            }
            self.cancel()?;
            return Err(Doubt::Elsewhere);
        }
        if stopped.event != 0 {
            return Ok(Stop::Trap);
        }
        self.go_home()?;
        Ok(Stop::Signal(stopped.signal))
    }

    /// Lets it do the call that it has entered, and returns what the call returns. None: it was interrupted before it
    /// did anything.
    ///
    /// A call that has not returned by the deadline is interrupted. One that the kernel does not let be interrupted
    /// is waited for: a thread that is within the kernel cannot be given its registers back, and would continue with
    /// ours.
    pub(super) fn leave(&mut self, deadline: Instant) -> Result<Option<i64>, Doubt> {
        let mut late = false;
        self.at_entry = false;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            let stopped = match wait(self.tid, Some(deadline))? {
                Some(stopped) => stopped,
                None => {
                    late = true;
                    ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
                    wait_ever(self.tid)?
                }
            };
            // Nothing else can come between a system call's two ends.
            if !stopped.is_system_call() {
                continue;
            }
            if !self.is_at(OP_EXIT)? {
                self.at_entry = true;
                self.cancel()?;
                return Err(Doubt::Elsewhere);
            }
            let registers = self.registers()?;
            let is_ours = self.set_up.is_some_and(|set_up| registers.orig_rax as i64 == set_up.number);
            self.go_home()?;
            let result = registers.rax as i64;
            return match (is_ours, late && result == -i64::from(libc::EINTR), RESTART.contains(&result)) {
                (false, ..) => Err(Doubt::Elsewhere),
                (true, true, _) => Err(Doubt::Late),
                (true, _, true) if late => Err(Doubt::Late),
                (true, _, true) => Ok(None),
                (true, _, false) => Ok(Some(result)),
            };
        }
    }

    /// Whether it is stopped at this end of the call that was set up, as the kernel reports it, whatever was expected.
    fn is_at(&self, op: u8) -> io::Result<bool> {
        let Some(set_up) = self.set_up else { return Ok(false) };
        let mut seen = SystemCall::default();
        // SAFETY: the kernel writes at most the given size to the address, and both are those of `seen`.
        let got = unsafe {
            libc::ptrace(PTRACE_GET_SYSCALL_INFO, self.tid, size_of::<SystemCall>(), (&raw mut seen).cast::<c_void>())
        };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        let there = seen.op == op && seen.instruction == set_up.instruction + INSTRUCTION;
        let [number, arguments @ .., _] = seen.data;
        Ok(there && (op != OP_ENTRY || (number as c_long == set_up.number && arguments == set_up.arguments)))
    }

    /// Whether this signal waits for the thread.
    pub(super) fn has_pending(&self, process: Process, signal: c_int) -> bool {
        let path = format!("/proc/{}/task/{}/status", process.pid, self.tid);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mask = text.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigPnd:")?.trim(), 16).ok());
        mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
    }

    /// Stops it, wherever it is with our registers, and restores its own.
    fn recall(&mut self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        // Without a stop its registers cannot be restored, and released it would continue with ours.
        let stopped = wait_ever(self.tid)?;
        if stopped.is_system_call() {
            self.at_entry = true;
            return self.cancel();
        }
        if stopped.event == 0 {
            self.signal = stopped.signal;
        }
        self.go_home()
    }

    /// At the beginning of a system call: have the kernel do none, and give the thread its own registers.
    fn cancel(&mut self) -> io::Result<()> {
        let registers = self.registers()?;
        self.set_registers(&user_regs_struct { orig_rax: u64::MAX, ..registers })?;
        self.at_entry = false;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            if wait_ever(self.tid)?.is_system_call() {
                return self.go_home();
            }
        }
    }

    /// At a stop for a signal: let it be delivered, and the thread run.
    pub(super) fn deliver(&mut self, signal: c_int) -> io::Result<()> {
        self.home = None;
        ptrace(libc::PTRACE_CONT, self.tid, 0, signal as usize)
    }

    /// Lets the thread run.
    pub(super) fn resume(&mut self) -> io::Result<()> {
        self.deliver(0)
    }

    fn go_home(&mut self) -> io::Result<()> {
        if let Some(home) = self.home.filter(|_| self.away) {
            self.set_registers(&home)?;
            self.away = false;
        }
        Ok(())
    }

    fn registers(&self) -> io::Result<user_regs_struct> {
        let mut registers = MaybeUninit::<user_regs_struct>::uninit();
        // SAFETY: the kernel writes one whole user_regs_struct to the address, or fails.
        let got = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.tid, null_mut::<c_void>(), registers.as_mut_ptr()) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so it is written.
        Ok(unsafe { registers.assume_init() })
    }

    fn set_registers(&self, registers: &user_regs_struct) -> io::Result<()> {
        // SAFETY: the kernel reads one whole user_regs_struct from the address and touches no memory of ours.
        let set = unsafe {
            libc::ptrace(libc::PTRACE_SETREGS, self.tid, null_mut::<c_void>(), std::ptr::from_ref(registers))
        };
        if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // It may have been killed meanwhile. If it is not stopped, it is released when the tracing thread ends. On
        // release the kernel checks for signals and for a system call to restart.
        if self.at_entry {
            let _ = self.cancel();
        }
        let _ = self.go_home();
        if let Some(home) = self.home {
            let _ = self.set_registers(&home);
        }
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, self.signal as usize);
    }
}

/// If the thread was in one of the system calls that Linux does not restart, let it be restarted unless a handler runs.
fn restartable(registers: &mut user_regs_struct) -> Option<&user_regs_struct> {
    let interrupted = registers.orig_rax as i64 >= 0 && registers.rax as i64 == -i64::from(libc::EINTR);
    if !interrupted || !super::thread::NEVER_RESTARTED.contains(&(registers.orig_rax as i64)) {
        return None;
    }
    registers.rax = -ERESTARTNOHAND as u64;
    Some(registers)
}

fn ptrace(request: c_uint, tid: c_int, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: used with requests only whose address and data are numbers, not addresses of ours.
    let done = unsafe {
        libc::ptrace(request, tid, without_provenance_mut::<c_void>(address), without_provenance_mut::<c_void>(data))
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A stop under ptrace.
#[derive(Debug, Clone, Copy)]
struct Stopped {
    /// The signal that is about to be delivered; `SIGTRAP | 0x80` at a system call.
    signal: c_int,
    /// `PTRACE_EVENT_*`, or 0.
    event: c_int,
}

impl Stopped {
    fn is_system_call(self) -> bool {
        self.event == 0 && self.signal == libc::SIGTRAP | 0x80
    }
}

fn wait_ever(tid: c_int) -> io::Result<Stopped> {
    loop {
        if let Some(stopped) = wait(tid, None)? {
            return Ok(stopped);
        }
    }
}

/// The next stop of thread `tid`. `None`: none by the deadline. `ESRCH` if it ended.
fn wait(tid: c_int, deadline: Option<Instant>) -> io::Result<Option<Stopped>> {
    let started = Instant::now();
    let patience = if deadline.is_some() { libc::WNOHANG } else { 0 };
    loop {
        // Only checked at first: a process that has ended is left for its parent, which may be us.
        let seen = wait_id(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | patience)?;
        match seen.map(|seen| seen.si_code) {
            Some(libc::CLD_TRAPPED | libc::CLD_STOPPED) => {
                // It may have been killed since.
                if let Some(info) = wait_id(tid, libc::WSTOPPED | libc::WNOHANG)? {
                    // SAFETY: what waitid has filled in holds a status.
                    let status = unsafe { info.si_status() };
                    return Ok(Some(Stopped { signal: status & 0xff, event: status >> 8 }));
                }
            }
            Some(_) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            None => {}
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Ok(None);
        }
        if now - started < SPIN {
            thread::yield_now();
        } else {
            thread::sleep(NAP);
        }
    }
}

/// `waitid` for thread `tid`. `None`: nothing yet.
fn wait_id(tid: c_int, flags: c_int) -> io::Result<Option<libc::siginfo_t>> {
    let id = libc::id_t::try_from(tid).map_err(io::Error::other)?;
    // SAFETY: siginfo_t is numbers and may be all zero, which means "nothing yet".
    let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
    loop {
        // SAFETY: the kernel writes one siginfo_t to the address, which lives through the call.
        if unsafe { libc::waitid(libc::P_PID, id, &raw mut info, flags | libc::__WALL) } == 0 {
            return Ok((info.si_signo != 0).then_some(info));
        }
        let e = io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => return Err(e),
        }
    }
}
