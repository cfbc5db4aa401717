//! File descriptors of another process: duplicating one, or replacing one by another.

use crate::inject::{Call, InjectError, Injector, StoppedThread};
use crate::process::Process;
use rustix::fd::OwnedFd;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::io;
use std::os::fd::RawFd;

/// Returns a duplicate of descriptor `fd` of `process`. Both refer to the same open file, so data that waits in it can
/// be read through either.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process; `NotFound` if it has ended. The error names the
/// descriptor.
pub fn take(process: Process, fd: RawFd) -> io::Result<OwnedFd> {
    pidfd_getfd(process.pidfd()?, fd, PidfdGetfdFlags::empty()).map_err(|e| {
        let e = io::Error::from(e);
        io::Error::new(e.kind(), format!("descriptor {fd} of process {}: {e}", process.pid))
    })
}

/// Makes descriptor `to` refer to the open file of descriptor `from`, for each `(from, to)`, as `dup3(from, to,
/// O_CLOEXEC)` inside the process. [`crate::inject`] describes the effects on the process.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process or while another process traces it. Pairs before the
/// failed one stay replaced, and the process continues.
pub fn replace(injector: Injector, pairs: &[(RawFd, RawFd)]) -> io::Result<()> {
    run_for_each(injector, pairs, duplicate_to)
}

/// Makes descriptor `to` refer to the open file of descriptor `from`, and closes `from`, for each `(from, to)`. Otherwise
/// as [`replace`].
///
/// # Errors
/// As for [`replace`].
pub fn move_to(injector: Injector, pairs: &[(RawFd, RawFd)]) -> io::Result<()> {
    run_for_each(injector, pairs, |thread, from, to| {
        duplicate_to(thread, from, to)?;
        let closed = thread.call(Call::new("close", libc::SYS_close, [from as u64]));
        closed.map(drop).map_err(|e| failed(e.into(), &format!("close descriptor {from}")))
    })
}

/// Closes descriptor `fd` of the process.
///
/// # Errors
/// [`InjectError`]: the process has no such descriptor, or cannot be traced.
pub fn close(injector: Injector, fd: RawFd) -> Result<(), InjectError> {
    injector.call(Call::new("close", libc::SYS_close, [fd as u64])).map(drop)
}

/// Stops a thread of the process once, and makes it do `work` for each pair.
fn run_for_each(
    injector: Injector,
    pairs: &[(RawFd, RawFd)],
    work: fn(&mut StoppedThread, RawFd, RawFd) -> io::Result<()>,
) -> io::Result<()> {
    if pairs.is_empty() {
        return Ok(());
    }
    let named = |e: io::Error| io::Error::new(e.kind(), format!("process {}: {e}", injector.process().pid));
    injector.run(|thread| Ok(pairs.iter().try_for_each(|&(from, to)| work(thread, from, to))))?.map_err(named)
}

fn duplicate_to(thread: &mut StoppedThread, from: RawFd, to: RawFd) -> io::Result<()> {
    let call = Call::new("dup3", libc::SYS_dup3, [from as u64, to as u64, libc::O_CLOEXEC as u64]);
    thread.call(call).map(drop).map_err(|e| failed(e.into(), &format!("put descriptor {from} in the place of {to}")))
}

fn failed(e: io::Error, what: &str) -> io::Error {
    let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
    io::Error::new(e.kind(), format!("cannot {what}: {why}"))
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
        // Written through the child's own standard output, read at our end of the pipe.
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
            let injector = Injector::new(process).unwrap();
            replace(injector, &[(9, 8)]).unwrap();
            assert!(take(process, 9).is_ok());
            move_to(injector, &[(9, 8)]).unwrap();
            assert!(take(process, 9).is_err());
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
        // Immediately after the spawn the child may not have finished its exec: its answer shows that the program runs.
        child.stdin.as_mut().unwrap().write_all(b"there?\n").unwrap();
        let mut answer = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        assert_eq!(answer, "there?\n");
        let process = Process::of(child.id()).unwrap();
        let e = replace(Injector::new(process).unwrap(), &[(77, 78)]).unwrap_err();
        assert_eq!(e.raw_os_error(), None);
        assert!(e.to_string().contains("descriptor 77"), "{e}");
        assert!(take(process, 77).is_err());
        assert!(process.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
