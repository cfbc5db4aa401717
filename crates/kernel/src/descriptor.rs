//! File descriptors of another process: take a duplicate of one, or put one in another's place.

use crate::process::Process;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::fd::OwnedFd;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::thread;

/// A duplicate of descriptor `fd` of `process`: the same open file, so that what waits in it waits for both.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process; `NotFound` if it has ended; the number is named.
pub fn take(process: Process, fd: RawFd) -> io::Result<OwnedFd> {
    pidfd_getfd(process.pidfd()?, fd, PidfdGetfdFlags::empty()).map_err(|e| {
        let e = io::Error::from(e);
        io::Error::new(e.kind(), format!("descriptor {fd} of process {}: {e}", process.pid))
    })
}

/// Puts descriptors of a process in the place of others. What takes time is done beforehand.
#[derive(Debug, Clone, Copy)]
pub struct Replacer {
    process: Process,
    instruction: u64,
}

impl Replacer {
    /// Get ready for `process`: find the `syscall` instruction of its vDSO.
    ///
    /// # Errors
    /// `PermissionDenied` without the right to trace the process; `NotFound` if it has ended.
    pub fn new(process: Process) -> io::Result<Self> {
        Ok(Self { process, instruction: syscall_instruction(process)? })
    }

    /// Make descriptor `to` mean what descriptor `from` means, for each `(from, to)`, as `dup3(from, to, O_CLOEXEC)`
    /// inside the process.
    ///
    /// The process is stopped by ptrace for some 100 µs, from whatever state it is in: the calls are made through the
    /// `syscall` instruction of its vDSO, and an interrupted system call is restarted by the kernel afterwards.
    ///
    /// # Errors
    /// `PermissionDenied` without the right to trace the process or while another tracer has it; the process goes on as
    /// it was, up to the pair that failed.
    pub fn replace(self, pairs: &[(RawFd, RawFd)]) -> io::Result<()> {
        if pairs.is_empty() {
            return Ok(());
        }
        // ptrace belongs to a thread: a thread of its own cannot leave a tracee behind, because when it ends the kernel
        // detaches.
        thread::scope(|scope| {
            thread::Builder::new()
                .name("descriptor replace".into())
                .spawn_scoped(scope, || inject(self.process, self.instruction, pairs))?
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the tracing thread panicked")))
        })
    }
}

/// Let the main thread of `process` do the calls.
fn inject(process: Process, instruction: u64, pairs: &[(RawFd, RawFd)]) -> io::Result<()> {
    let pid = Pid::from_raw(i32::try_from(process.pid).map_err(io::Error::other)?);
    ptrace::seize(pid, ptrace::Options::empty())?;
    let called = ptrace::interrupt(pid).map_err(io::Error::from).and_then(|()| {
        wait_interrupted(pid)?;
        pairs.iter().try_for_each(|&(from, to)| {
            let arguments = [from as u64, to as u64, libc::O_CLOEXEC as u64];
            call(pid, instruction, libc::SYS_dup3, arguments).map(drop).map_err(|e| {
                let text = format!("cannot put descriptor {from} in the place of {to} in process {}: {e}", process.pid);
                io::Error::new(e.kind(), text)
            })
        })
    });
    let _ = ptrace::detach(pid, None);
    called
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
fn call(pid: Pid, instruction: u64, number: i64, arguments: [u64; 3]) -> io::Result<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    #[test]
    fn a_taken_descriptor_is_the_same_open_file() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        let out = take(process, 1).unwrap();
        // Written through the child's own standard output, read at our end of it.
        std::fs::File::from(out).write_all(b"through the back door\n").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "through the back door\n");
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn a_descriptor_is_replaced_in_a_process_that_sits_in_a_system_call_and_in_one_that_computes() {
        for script in [
            "read line <&0; echo $line >&8",
            "i=0; while ! read -t 0 <&0; do i=$((i+1)); done; read line; echo $line >&8",
        ] {
            let (mut first, first_out) = std::io::pipe().unwrap();
            let (mut second, second_out) = std::io::pipe().unwrap();
            let hand_on = |fd: RawFd, to: RawFd| format!("exec {to}>/proc/{}/fd/{fd};", std::process::id());
            let setup = hand_on(first_out.as_raw_fd(), 8) + &hand_on(second_out.as_raw_fd(), 9) + "echo ready;";
            let mut child = Command::new("bash")
                .args(["-c", &(setup + script)])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut ready = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
            let process = Process::of(child.id()).unwrap();
            Replacer::new(process).unwrap().replace(&[(9, 8)]).unwrap();
            child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
            assert!(child.wait().unwrap().success());
            drop((first_out, second_out));
            let mut text = String::new();
            first.read_to_string(&mut text).unwrap();
            assert_eq!(text, "");
            second.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello\n");
        }
    }

    #[test]
    fn a_descriptor_that_is_not_there_is_an_error_and_the_process_lives_on() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Right after the spawn the child may be half way through its exec: its answer shows that it is there.
        child.stdin.as_mut().unwrap().write_all(b"there?\n").unwrap();
        let mut answer = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        assert_eq!(answer, "there?\n");
        let process = Process::of(child.id()).unwrap();
        let e = Replacer::new(process).unwrap().replace(&[(77, 78)]).unwrap_err();
        assert_eq!(e.raw_os_error(), None);
        assert!(e.to_string().contains("descriptor 77"), "{e}");
        assert!(take(process, 77).is_err());
        assert!(process.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
