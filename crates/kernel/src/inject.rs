//! System calls made inside another process.

use crate::process::Process;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs;
use std::io;
use std::thread;

/// A system call: its number and its first three arguments.
pub type Call = (i64, [u64; 3]);

/// Makes system calls inside a process. What takes time is done beforehand.
#[derive(Debug, Clone, Copy)]
pub struct Injector {
    process: Process,
    instruction: u64,
}

impl Injector {
    /// Get ready for `process`: find the `syscall` instruction of its vDSO.
    ///
    /// # Errors
    /// `PermissionDenied` without the right to trace the process; `NotFound` if it has ended.
    pub fn new(process: Process) -> io::Result<Self> {
        Ok(Self { process, instruction: syscall_instruction(process)? })
    }

    /// Where the calls are made.
    #[must_use]
    pub fn process(self) -> Process {
        self.process
    }

    /// Make `calls` one after the other on the main thread, and give what they return.
    ///
    /// The process is stopped by ptrace for some 100 µs and as long as the calls take, from whatever state it is in: the
    /// calls are made through the `syscall` instruction of its vDSO, and an interrupted system call is restarted by the
    /// kernel afterwards.
    ///
    /// # Errors
    /// `PermissionDenied` without the right to trace the process or while another tracer has it, or what the call that
    /// failed returned, with its place among `calls`; the process goes on as it was, up to that call.
    pub fn call(self, calls: &[Call]) -> Result<Vec<u64>, (usize, io::Error)> {
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        // ptrace belongs to a thread: a thread of its own cannot leave a tracee behind, because when it ends the kernel
        // detaches.
        thread::scope(|scope| {
            thread::Builder::new()
                .name("inject".into())
                .spawn_scoped(scope, || self.trace(calls))
                .map_err(|e| (0, e))?
                .join()
                .unwrap_or_else(|_| Err((0, io::Error::other("the tracing thread panicked"))))
        })
    }

    fn trace(self, calls: &[Call]) -> Result<Vec<u64>, (usize, io::Error)> {
        let first = |e: io::Error| (0, e);
        let pid = i32::try_from(self.process.pid).map_err(io::Error::other).map_err(first)?;
        let pid = Pid::from_raw(pid);
        ptrace::seize(pid, ptrace::Options::empty()).map_err(|e| first(e.into()))?;
        let stopped = ptrace::interrupt(pid).map_err(io::Error::from).and_then(|()| wait_interrupted(pid));
        let returned = stopped.map_err(first).and_then(|()| {
            let one = |(at, &what)| call(pid, self.instruction, what).map_err(|e| (at, e));
            calls.iter().enumerate().map(one).collect()
        });
        let _ = ptrace::detach(pid, None);
        returned
    }
}

/// Wait for the stop that `PTRACE_INTERRUPT` asked for. A signal that comes first is passed on.
fn wait_interrupted(pid: Pid) -> io::Result<()> {
    loop {
        match waitpid(pid, Some(WaitPidFlag::__WALL))? {
            WaitStatus::PtraceEvent(..) => return Ok(()),
            WaitStatus::Stopped(_, signal) => ptrace::cont(pid, signal)?,
            other => return Err(io::Error::other(format!("ended while traced: {other:?}"))),
        }
    }
}

/// With the thread stopped: run one system call by single step and put every register back.
fn call(pid: Pid, instruction: u64, (number, arguments): Call) -> io::Result<u64> {
    let saved = ptrace::getregs(pid)?;
    let mut registers = saved;
    registers.rip = instruction;
    registers.rax = number as u64;
    // Not in a system call: keeps the kernel from "restarting" one with our registers.
    registers.orig_rax = u64::MAX;
    [registers.rdi, registers.rsi, registers.rdx] = arguments;
    ptrace::setregs(pid, registers)?;
    let stepped = ptrace::step(pid, None).map_err(io::Error::from).and_then(|()| {
        loop {
            match waitpid(pid, Some(WaitPidFlag::__WALL))? {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => break Ok(()),
                // Another signal came before the step: let it be delivered once the registers are back.
                WaitStatus::Stopped(_, other) => break Err(io::Error::other(format!("{other} came first; try again"))),
                WaitStatus::PtraceEvent(..) => ptrace::step(pid, None)?,
                other => break Err(io::Error::other(format!("ended while traced: {other:?}"))),
            }
        }
    });
    let result = ptrace::getregs(pid).map(|r| r.rax);
    ptrace::setregs(pid, saved)?;
    stepped?;
    let result = result? as i64;
    match u64::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL))),
    }
}

/// Where the vDSO of `process` has a `syscall` instruction (`0f 05`).
fn syscall_instruction(process: Process) -> io::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", process.pid))?;
    let none =
        || io::Error::new(io::ErrorKind::NotFound, format!("process {} has no vDSO to call through", process.pid));
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).ok_or_else(none)?;
    let range = line.split(' ').next().and_then(|range| range.split_once('-')).ok_or_else(none)?;
    let start = u64::from_str_radix(range.0, 16).map_err(|_| none())?;
    let end = u64::from_str_radix(range.1, 16).map_err(|_| none())?;
    let mut text = vec![0; (end - start) as usize];
    crate::memory::read(process, start, &mut text)?;
    let at = text.windows(2).position(|two| two == [0x0f, 0x05]).ok_or_else(none)?;
    Ok(start + at as u64)
}
