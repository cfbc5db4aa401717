//! File descriptors of another process: taking a duplicate of one, giving it one, or replacing one by another.

use crate::inject::{Call, InjectError, Injector, StoppedThread};
use crate::memory;
use crate::process::Process;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
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

/// Opens the file that a Unix socket was bound to (`linux/un.h`).
const SIOCUNIXFILE: libc::c_int = 0x89e0;

mod ioctl {
    #![allow(missing_docs)]
    nix::ioctl_write_int_bad!(open_unix_file, super::SIOCUNIXFILE);
}

/// Returns whether the file that the Unix socket `fd` of `process` was bound to has been removed. A later socket may have
/// the same path.
///
/// # Errors
/// As for [`take`]; `PermissionDenied` also without `CAP_NET_ADMIN`, `NotFound` also if the socket was bound to no file.
/// The error names the descriptor.
pub fn is_socket_file_removed(process: Process, fd: RawFd) -> io::Result<bool> {
    let socket = take(process, fd)?;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("file of socket {fd} of process {}: {e}", process.pid));
    // SAFETY: the call reads no memory of this process.
    let file = unsafe { ioctl::open_unix_file(socket.as_raw_fd(), 0) }.map_err(|e| named(e.into()))?;
    // SAFETY: the call has returned a new descriptor, which nothing else owns.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    Ok(fstat(&file).map_err(|e| named(e.into()))?.st_nlink == 0)
}

/// Gives the process a duplicate of `descriptor`, which is closed on exec, and returns its number there. The process
/// receives it from a pair of sockets that it makes for that and closes again.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process or while another process traces it. A process that is killed
/// meanwhile, or whose tracer is, may keep the sockets and a page of memory.
pub fn give(injector: Injector, descriptor: BorrowedFd<'_>) -> io::Result<RawFd> {
    let process = injector.process();
    let named = |e: io::Error| io::Error::new(e.kind(), format!("process {}: {e}", process.pid));
    injector.run(|thread| Ok(receive(thread, process, descriptor)))?.map_err(named)
}

/// Bytes of memory that the process gets for the arguments of its calls.
const ARGUMENT_BYTES: u64 = 4096;

/// Makes the thread receive `descriptor`.
fn receive(thread: &mut StoppedThread, process: Process, descriptor: BorrowedFd<'_>) -> io::Result<RawFd> {
    let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let map = Call::new("mmap", libc::SYS_mmap, [0, ARGUMENT_BYTES, access, kind, u64::MAX, 0]);
    let arguments = thread.call(map).map_err(|e| failed(e.into(), "map memory"))?;
    let received = receive_with(thread, process, descriptor, arguments);
    let _ = thread.call(Call::new("munmap", libc::SYS_munmap, [arguments, ARGUMENT_BYTES]));
    received
}

fn receive_with(
    thread: &mut StoppedThread,
    process: Process,
    descriptor: BorrowedFd<'_>,
    arguments: u64,
) -> io::Result<RawFd> {
    let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
    let make = Call::new("socketpair", libc::SYS_socketpair, [libc::AF_UNIX as u64, kind, 0, arguments]);
    thread.call(make).map_err(|e| failed(e.into(), "make a pair of sockets"))?;
    let mut numbers = [0; 8];
    memory::read(process, arguments, &mut numbers)?;
    let [receiver, sender] = [&numbers[..4], &numbers[4..]].map(|bytes| int(bytes).unwrap_or(-1));
    let received =
        send_to(process, sender, descriptor).and_then(|()| receive_from(thread, process, receiver, arguments));
    for socket in [receiver, sender] {
        let _ = thread.call(Call::new("close", libc::SYS_close, [socket as u64]));
    }
    received
}

/// Sends `descriptor` through the socket `sender` of the process.
fn send_to(process: Process, sender: RawFd, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let sender = take(process, sender)?;
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&sender, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::DONTWAIT)?;
    Ok(())
}

/// Makes the thread receive one message with a descriptor, whose number it returns.
fn receive_from(thread: &mut StoppedThread, process: Process, receiver: RawFd, arguments: u64) -> io::Result<RawFd> {
    // Positions of the byte that was sent, of `struct iovec` and of the ancillary data behind `struct msghdr`.
    const DATA: u64 = 128;
    const PIECE: u64 = 192;
    const ANCILLARY: u64 = 256;
    /// Length of `struct cmsghdr` with a descriptor, which follows 16 bytes.
    const ANCILLARY_BYTES: u64 = 24;
    let piece = [arguments + DATA, 1];
    // Name and its length; pieces and their number; ancillary data and its length; flags. A field of 4 bytes has 8.
    let message = [0, 0, arguments + PIECE, 1, arguments + ANCILLARY, ANCILLARY_BYTES, 0];
    memory::write(process, arguments + PIECE, piece.map(u64::to_ne_bytes).as_flattened())?;
    memory::write(process, arguments, message.map(u64::to_ne_bytes).as_flattened())?;
    let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
    let call = Call::new("recvmsg", libc::SYS_recvmsg, [receiver as u64, arguments, flags]);
    thread.call(call).map_err(|e| failed(e.into(), "receive a descriptor"))?;
    let mut ancillary = [0; ANCILLARY_BYTES as usize];
    memory::read(process, arguments + ANCILLARY, &mut ancillary)?;
    let words = ancillary.get(8..20).unwrap_or_default().chunks(4).map(int).collect::<Vec<_>>();
    match words[..] {
        [Some(libc::SOL_SOCKET), Some(libc::SCM_RIGHTS), Some(number)] => Ok(number),
        // A security module may have removed it.
        _ => Err(io::Error::new(io::ErrorKind::PermissionDenied, "it may not receive the descriptor")),
    }
}

fn int(bytes: &[u8]) -> Option<i32> {
    bytes.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes))
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
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixListener;
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
    fn sockets_at_one_path_are_distinguished() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = UnixListener::bind(&path).unwrap();
        let is_removed = |socket: &UnixListener| {
            is_socket_file_removed(Process::of(std::process::id()).unwrap(), socket.as_raw_fd())
        };
        assert!(!is_removed(&first).unwrap());
        std::fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        assert!(is_removed(&first).unwrap());
        assert!(!is_removed(&second).unwrap());
    }

    #[test]
    fn a_process_is_given_a_descriptor_and_keeps_nothing_else() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"there?\n").unwrap();
        let mut answer = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        let process = Process::of(child.id()).unwrap();
        let open = || std::fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap().count();
        let mappings = || crate::maps::of(process).unwrap();
        let before = (open(), mappings());
        let (mut ours, theirs) = std::io::pipe().unwrap();
        let number = give(Injector::new(process).unwrap(), theirs.as_fd()).unwrap();
        drop(theirs);
        assert_eq!((open(), mappings()), (before.0 + 1, before.1));
        std::fs::File::from(take(process, number).unwrap()).write_all(b"x").unwrap();
        let mut byte = [0];
        ours.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        let flags = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", process.pid)).unwrap();
        assert!(flags.lines().any(|line| line.starts_with("flags:") && line.ends_with("2000001")), "{flags}");
        child.kill().unwrap();
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
