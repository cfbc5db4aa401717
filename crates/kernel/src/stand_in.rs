//! A tap that replaces, for a time, a tap that another process still uses.
//!
//! A destination QEMU is started with a stand-in, and gets the real tap under the same descriptor number later
//! (`dup3`). A wait with io_uring, which QEMU uses since 10.2, refers to the file that had the number when the wait
//! began, which is the stand-in. The stand-in is therefore made readable once: QEMU wakes up, reads from the file that
//! the number refers to now, and waits on that file from then on.

use crate::tap::Features;
use crate::{link, tap};
use rustix::fd::OwnedFd;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

/// A broadcast frame of an EtherType for local experiments: it has no meaning, and no program reads it.
const FRAME: [u8; 60] = {
    let mut frame = [0; 60];
    let (mut at, local) = (0, [0x02, 0, 0, 0, 0, 0x01, 0x88, 0xb5]);
    while at < 6 {
        frame[at] = 0xff;
        at += 1;
    }
    while at < 6 + local.len() {
        frame[at] = local[at - 6];
        at += 1;
    }
    frame
};

/// A tap interface that is removed when its last descriptor is closed.
#[derive(Debug)]
pub struct StandIn {
    name: String,
    tap: OwnedFd,
    /// `control` and `frames` belong to the interface's network namespace, also when a thread of another namespace uses
    /// them.
    control: OwnedFd,
    frames: OwnedFd,
    index: u32,
}

impl StandIn {
    /// Makes the interface `name` in the network namespace of the calling thread, with the features of the tap that it
    /// replaces. The interface is down.
    ///
    /// # Errors
    /// As for [`tap::open`].
    pub fn open(name: &str, features: Features) -> io::Result<Self> {
        let tap = tap::open_transient(name, features)?;
        let named = |e: io::Error| io::Error::new(e.kind(), format!("frames into {name}: {e}"));
        // Protocol 0: the socket receives nothing.
        // SAFETY: socket() takes no pointers; a descriptor that it returns is ours alone.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(named(io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just made by socket() and nothing else has it.
        let frames = unsafe { OwnedFd::from_raw_fd(fd) };
        let index = rustix::net::netdevice::name_to_index(&frames, name).map_err(|e| named(e.into()))?;
        Ok(Self { name: name.to_owned(), tap, control: link::socket()?, frames, index })
    }

    /// Returns another descriptor of the tap, for a QEMU.
    ///
    /// # Errors
    /// `EMFILE` when the process has no free descriptor.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.tap.try_clone()
    }

    /// Returns whether the program that has the tap has detached it: it does not read it.
    ///
    /// # Errors
    /// As for [`tap::queue`].
    pub fn is_detached(&self) -> io::Result<bool> {
        Ok(tap::queue(self.tap.as_fd())?.is_detached)
    }

    /// Makes the tap readable. Call this after QEMU's descriptor number refers to the real tap.
    ///
    /// # Errors
    /// When the interface cannot be set up, or accepts no frame.
    pub fn wake(&self) -> io::Result<()> {
        link::up_by(&self.control, &self.name)?;
        // SAFETY: sockaddr_ll is plain integers, for which zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { MaybeUninit::zeroed().assume_init() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_ifindex = self.index as i32;
        address.sll_halen = 6;
        // SAFETY: frame and address are given with their true lengths, and live through the call.
        let sent = unsafe {
            libc::sendto(
                self.frames.as_raw_fd(),
                FRAME.as_ptr().cast(),
                FRAME.len(),
                0,
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if sent < 0 {
            let e = io::Error::last_os_error();
            return Err(io::Error::new(e.kind(), format!("a frame into {}: {e}", self.name)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn it_is_silent_until_it_is_woken() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let stand_in = StandIn::open(&format!("rks{}", std::process::id()), Features::OWN).unwrap();
        let given = stand_in.descriptor().unwrap();
        let readable = |limit: i64| {
            let mut fds = [PollFd::new(&given, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: limit, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!readable(0));
        stand_in.wake().unwrap();
        assert!(readable(10));
        stand_in.wake().unwrap();
    }
}
