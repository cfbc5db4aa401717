//! One thread of another process under ptrace, which is made to execute system calls: *injected* calls.
//!
//! The kernel gives a stopped thread whatever registers ptrace sets, and continues with them on resumption. A
//! [`Tracee`] therefore always knows which ones are in place ([`RegistersInPlace`]):
//!
//! ```text
//!            halt            set_call            enter_call
//! running ─────────> Own ───────────────> Call ──────────────> CallAtEntry
//!    ^                │ ^                  │ ^                    │  │
//!    └─ deliver, ─────┘ │                  │ └─── finish_call ────┘  │ cancel: the kernel executes no call
//!       resume, drop    ├ restore_registers┘    (the call returns)   │
//!                       └────────────────────────────────────────────┘
//! ```
//!
//! A thread must never be released in another state than `Own`: dropping a [`Tracee`] leads back there from each. If
//! the tracer dies, the thread restores itself from a *signal frame*, the registers in the form in which the kernel
//! stores them for a signal handler, which [`Tracee::prepare_return`] has written to the thread's stack.

use super::Call;
use super::frame::{
    MAX_EXTENDED_BYTES, MIN_EXTENDED_BYTES, RESTART_RESULTS, SYSCALL_INSTRUCTION_BYTES, SignalFrame, ThreadState,
    end_of_component,
};
use crate::memory;
use crate::process::Process;
use libc::{c_int, c_long, c_uint, c_void, user_regs_struct};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ptr::{null_mut, without_provenance_mut};
use std::thread;
use std::time::{Duration, Instant};

/// Result with which the kernel restarts a system call unless a signal handler runs (`linux/errno.h`); never visible to
/// a program.
const ERESTARTNOHAND: i64 = 514;
/// Value of the code segment register in 64-bit programs.
const USER64_CS: u64 = 0x33;
/// Time for which a wait for a stop only yields the processor between two polls. Afterwards it sleeps for
/// [`POLL_INTERVAL`].
const YIELD_TIME: Duration = Duration::from_micros(300);
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The event that stopped a thread on its way into an injected system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryStop {
    /// The thread is about to execute the call.
    AtCall,
    /// A signal is about to be delivered; the thread has its own registers again.
    Signal(c_int),
    /// The thread stopped for job control; its registers are still those of the call.
    JobControl,
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

/// The used part of `struct ptrace_syscall_info`.
#[repr(C)]
#[derive(Debug, Default)]
struct SyscallInfo {
    /// `OP_ENTRY` or `OP_EXIT`.
    op: u8,
    pad: [u8; 3],
    arch: u32,
    instruction: u64,
    stack: u64,
    /// At entry: the number and the arguments. At exit: the result.
    data: [u64; 8],
}

const PTRACE_GET_SYSCALL_INFO: c_uint = 0x420e;
const OP_ENTRY: u8 = 1;
const OP_EXIT: u8 = 2;
const _: () = assert!(size_of::<SyscallInfo>() == 88);

const PTRACE_GETSIGMASK: c_uint = 0x420a;
/// `NT_X86_XSTATE` of `linux/elf.h`: the register set of all extended registers.
const EXTENDED_REGISTERS: usize = 0x202;
const PTRACE_GET_RSEQ_CONFIGURATION: c_uint = 0x420f;
const _: () = assert!(size_of::<RseqConfiguration>() == 24);
const _: () = assert!(size_of::<user_regs_struct>() == 27 * 8);

/// The reason why a call was cancelled. The thread has its own registers.
#[derive(Debug)]
pub(super) enum Cancelled {
    /// The thread did not reach the expected stop by the deadline.
    Late,
    /// The thread stopped at another place than the call that was set up.
    Elsewhere,
    /// ptrace failed.
    Failed(io::Error),
}

impl From<io::Error> for Cancelled {
    fn from(e: io::Error) -> Self {
        Self::Failed(e)
    }
}

/// Which registers a thread has while it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegistersInPlace {
    /// Its own.
    Own,
    /// Those of an injected call, which the thread has not entered, or which has returned.
    Call,
    /// Those of an injected call that the thread is entering. On resumption the kernel executes the call with the
    /// registers that the thread has then, so [`Tracee::cancel`] must first make it no call.
    CallAtEntry,
}

/// The call for which the thread's registers were set up.
#[derive(Debug, Clone, Copy)]
struct InjectedCall {
    /// Address of the `syscall` instruction.
    instruction: u64,
    call: Call,
}

/// A seized thread. Dropping it restores the thread's own registers and resumes the thread.
#[derive(Debug)]
pub(super) struct Tracee {
    tid: c_int,
    /// The thread's own registers while it is stopped.
    own_registers: Option<user_regs_struct>,
    registers_in_place: RegistersInPlace,
    /// Address of the [`SignalFrame`] with the thread's own registers: the stack pointer of injected calls.
    frame_address: Option<u64>,
    /// The call that was set up last.
    injected_call: Option<InjectedCall>,
    /// The signal for which the thread is stopped. It is delivered when the thread is released.
    signal: c_int,
}

impl Tracee {
    /// Becomes the tracer of thread `tid` with these options, without stopping the thread.
    pub(super) fn seize(tid: c_int, options: c_int) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, options as usize)?;
        Ok(Self {
            tid,
            own_registers: None,
            registers_in_place: RegistersInPlace::Own,
            frame_address: None,
            injected_call: None,
            signal: 0,
        })
    }

    /// Stops the thread with its own registers, wherever it is. Returns `false` if it did not stop by the deadline.
    ///
    /// Signals that come first are delivered.
    pub(super) fn halt(&mut self, deadline: Instant) -> io::Result<bool> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        loop {
            let Some(stopped) = wait_for_stop(self.tid, Some(deadline))? else { return Ok(false) };
            if stopped.event == libc::PTRACE_EVENT_STOP {
                break;
            }
            // A signal is about to be delivered, as usual: the thread has its own registers.
            self.make_restartable()?;
            ptrace(libc::PTRACE_CONT, self.tid, 0, stopped.signal as usize)?;
        }
        // Immediately, so that the call is restarted also if the tracer dies before it injects one.
        let registers = self.make_restartable()?;
        self.own_registers = Some(registers);
        Ok(true)
    }

    /// Applies [`make_restartable`] to the stopped thread. Returns its registers.
    fn make_restartable(&self) -> io::Result<user_regs_struct> {
        let mut registers = self.registers()?;
        if make_restartable(&mut registers) {
            self.set_registers(&registers)?;
        }
        Ok(registers)
    }

    /// Writes the signal frame from which the thread restores itself if the tracer dies during an injected call.
    /// Returns `false` if the stack has no room.
    pub(super) fn prepare_return(&mut self, process: Process, restorer: u64) -> io::Result<bool> {
        let Some(registers) = self.own_registers else { return Ok(false) };
        let extended_registers = self.extended_registers()?;
        let state = ThreadState { registers, signal_mask: self.signal_mask()?, extended_registers };
        let Some(frame) = SignalFrame::new(state, restorer, end_of_component) else { return Ok(false) };
        match memory::write(process, frame.address, frame.words.as_flattened()) {
            Ok(()) => self.frame_address = Some(frame.address),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            // `ESRCH` if the thread was killed.
            Err(e) => return self.registers().and(Err(e)),
        }
        Ok(true)
    }

    /// Returns whether the stopped thread runs 64-bit code.
    pub(super) fn is_64_bit(&self) -> bool {
        self.own_registers.is_some_and(|registers| registers.cs == USER64_CS)
    }

    /// Returns whether the thread is inside a restartable sequence. If the thread executed another call meanwhile, the
    /// kernel would not abort that sequence as it must.
    pub(super) fn in_restartable_sequence(&self, process: Process) -> bool {
        let Some(own_registers) = self.own_registers else { return false };
        let mut configuration = RseqConfiguration::default();
        // SAFETY: the kernel writes at most the given size to the address, and both are those of `configuration`.
        let result = unsafe {
            libc::ptrace(
                PTRACE_GET_RSEQ_CONFIGURATION,
                self.tid,
                size_of::<RseqConfiguration>(),
                (&raw mut configuration).cast::<c_void>(),
            )
        };
        // This kernel does not have the request, or the thread does not use rseq.
        if result < 0 || configuration.pointer == 0 {
            return false;
        }
        let read_word = |address: u64| {
            let mut bytes = [0; 8];
            memory::read(process, address, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // `struct rseq`: `rseq_cs` at 8. `struct rseq_cs`: `start_ip` at 8, `post_commit_offset` at 16.
        let section = read_word(configuration.pointer + 8).filter(|&section| section != 0);
        let Some(section) = section else { return false };
        match (read_word(section + 8), read_word(section + 16)) {
            (Some(start), Some(length)) => own_registers.rip.wrapping_sub(start) < length,
            // Where the sequence lies is unknown: the thread may be inside it.
            _ => true,
        }
    }

    /// Gives the thread the registers of `call`, which it is to make through the `syscall` instruction at address
    /// `instruction`. [`Tracee::prepare_return`] must have succeeded since the thread stopped.
    pub(super) fn set_call(&mut self, instruction: u64, call: Call) -> io::Result<()> {
        let (Some(own_registers), Some(frame_address)) = (self.own_registers, self.frame_address) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let [rdi, rsi, rdx, r10, r8, r9] = call.arguments;
        // `orig_rax` of -1 means that no system call is in progress. The kernel would otherwise restart a call with
        // these registers.
        let call_registers = user_regs_struct {
            rip: instruction,
            rsp: frame_address,
            rax: call.number as u64,
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..own_registers
        };
        self.injected_call = Some(InjectedCall { instruction, call });
        // Before the attempt: a failed one may have set some of them.
        self.registers_in_place = RegistersInPlace::Call;
        self.set_registers(&call_registers)
    }

    /// Makes the thread enter `call`, as for [`Tracee::set_call`].
    pub(super) fn enter_call(
        &mut self,
        instruction: u64,
        call: Call,
        deadline: Instant,
    ) -> Result<EntryStop, Cancelled> {
        self.set_call(instruction, call)?;
        ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
        let Some(stopped) = wait_for_stop(self.tid, Some(deadline))? else {
            self.stop_and_restore()?;
            return Err(Cancelled::Late);
        };
        if stopped.is_system_call() {
            self.registers_in_place = RegistersInPlace::CallAtEntry;
            if self.is_at(OP_ENTRY)? {
                return Ok(EntryStop::AtCall);
            }
            self.cancel()?;
            return Err(Cancelled::Elsewhere);
        }
        if stopped.event != 0 {
            return Ok(EntryStop::JobControl);
        }
        self.restore_registers()?;
        Ok(EntryStop::Signal(stopped.signal))
    }

    /// Makes the thread execute the call that it has entered, and returns the call's result. Returns `None` if the call
    /// was interrupted before it had an effect.
    ///
    /// A call that has not returned by the deadline is interrupted. If the kernel does not permit the interruption,
    /// this function waits: a thread inside the kernel cannot get its own registers back, and would continue with ours.
    pub(super) fn finish_call(&mut self, deadline: Instant) -> Result<Option<i64>, Cancelled> {
        let mut is_late = false;
        self.registers_in_place = RegistersInPlace::Call;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            let stopped = match wait_for_stop(self.tid, Some(deadline))? {
                Some(stopped) => stopped,
                None => {
                    is_late = true;
                    ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
                    wait_without_deadline(self.tid)?
                }
            };
            // Only the exit can follow the entry of a system call; other stops are skipped.
            if !stopped.is_system_call() {
                continue;
            }
            if !self.is_at(OP_EXIT)? {
                // It may be the entry of another call, which must not be executed.
                self.registers_in_place = RegistersInPlace::CallAtEntry;
                self.cancel()?;
                return Err(Cancelled::Elsewhere);
            }
            let registers = self.registers()?;
            let is_injected_call =
                self.injected_call.is_some_and(|injected| registers.orig_rax as i64 == injected.call.number);
            self.restore_registers()?;
            if !is_injected_call {
                return Err(Cancelled::Elsewhere);
            }
            let result = registers.rax as i64;
            let had_no_effect = RESTART_RESULTS.contains(&result);
            if is_late && (had_no_effect || result == -i64::from(libc::EINTR)) {
                return Err(Cancelled::Late);
            }
            return Ok((!had_no_effect).then_some(result));
        }
    }

    /// Returns whether the kernel reports that the thread is stopped at this end of the call that was set up.
    fn is_at(&self, op: u8) -> io::Result<bool> {
        let Some(InjectedCall { instruction, call }) = self.injected_call else { return Ok(false) };
        let mut info = SyscallInfo::default();
        // SAFETY: the kernel writes at most the given size to the address, and both are those of `info`.
        let result = unsafe {
            libc::ptrace(PTRACE_GET_SYSCALL_INFO, self.tid, size_of::<SyscallInfo>(), (&raw mut info).cast::<c_void>())
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let is_at_instruction = info.op == op && info.instruction == instruction + SYSCALL_INSTRUCTION_BYTES;
        let [number, arguments @ .., _] = info.data;
        let is_call = number as c_long == call.number && arguments == call.arguments;
        Ok(is_at_instruction && (op == OP_EXIT || is_call))
    }

    /// Returns whether `signal` is pending for the thread.
    pub(super) fn has_pending(&self, process: Process, signal: c_int) -> bool {
        let path = format!("/proc/{}/task/{}/status", process.pid, self.tid);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mask = text.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigPnd:")?.trim(), 16).ok());
        mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
    }

    /// Stops the thread, wherever it is with the registers of the injected call, and restores its own.
    fn stop_and_restore(&mut self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        // The wait has no deadline: the registers can be restored only at a stop, and a released thread would continue
        // with those of the call.
        let stopped = wait_without_deadline(self.tid)?;
        if stopped.is_system_call() {
            self.registers_in_place = RegistersInPlace::CallAtEntry;
            return self.cancel();
        }
        if stopped.event == 0 {
            self.signal = stopped.signal;
        }
        self.restore_registers()
    }

    /// Cancels the system call at whose entry the thread is stopped: the kernel executes none (number -1), and at its
    /// exit the thread gets its own registers back.
    fn cancel(&mut self) -> io::Result<()> {
        let registers = self.registers()?;
        self.set_registers(&user_regs_struct { orig_rax: u64::MAX, ..registers })?;
        self.registers_in_place = RegistersInPlace::Call;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            if wait_without_deadline(self.tid)?.is_system_call() {
                return self.restore_registers();
            }
        }
    }

    /// Resumes a thread that is stopped for a signal, and delivers the signal.
    pub(super) fn deliver(&mut self, signal: c_int) -> io::Result<()> {
        self.own_registers = None;
        self.frame_address = None;
        ptrace(libc::PTRACE_CONT, self.tid, 0, signal as usize)
    }

    /// Resumes the thread.
    pub(super) fn resume(&mut self) -> io::Result<()> {
        self.deliver(0)
    }

    /// Gives the thread its own registers back, if it has those of an injected call.
    fn restore_registers(&mut self) -> io::Result<()> {
        if self.registers_in_place != RegistersInPlace::Own
            && let Some(own_registers) = self.own_registers
        {
            self.set_registers(&own_registers)?;
            self.registers_in_place = RegistersInPlace::Own;
        }
        Ok(())
    }

    fn registers(&self) -> io::Result<user_regs_struct> {
        let mut registers = MaybeUninit::<user_regs_struct>::uninit();
        // SAFETY: the kernel writes one whole user_regs_struct to the address, or fails.
        let result =
            unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.tid, null_mut::<c_void>(), registers.as_mut_ptr()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so it is written.
        Ok(unsafe { registers.assume_init() })
    }

    fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        // SAFETY: the kernel writes as many bytes as the second number states to the address, the size of `mask`.
        let result = unsafe { libc::ptrace(PTRACE_GETSIGMASK, self.tid, size_of::<u64>(), &raw mut mask) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(mask) }
    }

    /// Returns the registers of the floating-point and vector units, and those of later extensions.
    fn extended_registers(&self) -> io::Result<Vec<u64>> {
        let mut words = vec![0u64; MAX_EXTENDED_BYTES / size_of::<u64>()];
        let mut buffer = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: MAX_EXTENDED_BYTES };
        // SAFETY: the kernel writes at most the length of `buffer`, which is that of `words`, and sets the length that
        // it has written.
        let result = unsafe { libc::ptrace(libc::PTRACE_GETREGSET, self.tid, EXTENDED_REGISTERS, &raw mut buffer) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if !(MIN_EXTENDED_BYTES..MAX_EXTENDED_BYTES).contains(&buffer.iov_len) {
            return Err(io::Error::other(format!("{} bytes of extended registers", buffer.iov_len)));
        }
        words.truncate(buffer.iov_len / size_of::<u64>());
        Ok(words)
    }

    fn set_registers(&self, registers: &user_regs_struct) -> io::Result<()> {
        // SAFETY: the kernel reads one whole user_regs_struct from the address and touches no memory of ours.
        let result = unsafe {
            libc::ptrace(libc::PTRACE_SETREGS, self.tid, null_mut::<c_void>(), std::ptr::from_ref(registers))
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // The errors are ignored: the thread may have been killed. If it is not stopped, the kernel releases it when
        // the tracing thread ends. On release the kernel checks for signals and for a system call to restart.
        if self.registers_in_place == RegistersInPlace::CallAtEntry {
            let _ = self.cancel();
        }
        let _ = self.restore_registers();
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, self.signal as usize);
    }
}

/// Has the kernel restart the call that the stop has interrupted, if it is one of those that Linux ends with `EINTR` on
/// any stop. If a signal handler runs first, the call still returns `EINTR`. Returns whether the registers changed.
fn make_restartable(registers: &mut user_regs_struct) -> bool {
    let interrupted_call = registers.orig_rax as i64;
    let returns_eintr = interrupted_call >= 0 && registers.rax as i64 == -i64::from(libc::EINTR);
    if !returns_eintr || !super::thread::NEVER_RESTARTED.contains(&interrupted_call) {
        return false;
    }
    registers.rax = -ERESTARTNOHAND as u64;
    true
}

fn ptrace(request: c_uint, tid: c_int, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: only requests whose address and data are numbers, not addresses of ours, are passed.
    let result = unsafe {
        libc::ptrace(request, tid, without_provenance_mut::<c_void>(address), without_provenance_mut::<c_void>(data))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
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

fn wait_without_deadline(tid: c_int) -> io::Result<Stopped> {
    loop {
        if let Some(stopped) = wait_for_stop(tid, None)? {
            return Ok(stopped);
        }
    }
}

/// Returns the next stop of thread `tid`, or `None` if there is none by the deadline. Fails with `ESRCH` if it ended.
fn wait_for_stop(tid: c_int, deadline: Option<Instant>) -> io::Result<Option<Stopped>> {
    let started = Instant::now();
    let blocking = if deadline.is_some() { libc::WNOHANG } else { 0 };
    loop {
        // `WNOWAIT` first: the exit status of a process that has ended is left for its parent, which may be this
        // process.
        let event = next_wait_event(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | blocking)?;
        match event.map(|event| event.si_code) {
            Some(libc::CLD_TRAPPED | libc::CLD_STOPPED) => {
                // The thread may have been killed since.
                if let Some(info) = next_wait_event(tid, libc::WSTOPPED | libc::WNOHANG)? {
                    // SAFETY: waitid has filled in a status.
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
        if now - started < YIELD_TIME {
            thread::yield_now();
        } else {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Calls `waitid` for thread `tid`. Returns `None` if there is no event yet.
fn next_wait_event(tid: c_int, flags: c_int) -> io::Result<Option<libc::siginfo_t>> {
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
