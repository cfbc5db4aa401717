//! Tap interfaces: opening, creating and removing them, what an open one is, and the queues of one with several.
//!
//! The tap of a guest that Rekindle has started is persistent, so that it outlives every QEMU. Packets that arrive while no
//! QEMU reads wait in its queue, which the next QEMU reads through a duplicate of the same open file. A tap may have
//! several queues, each with a file of its own. The kernel gives frames only to the queues that are attached.

use crate::link;
use crate::netns::Namespace;
use crate::packet::Frame;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::ffi::{CStr, c_int, c_short};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};

const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETPERSIST: u64 = 0x4004_54cb;
const TUNGETIFF: u64 = 0x8004_54d2;
const TUNGETVNETHDRSZ: u64 = 0x8004_54d7;
const TUNSETQUEUE: u64 = 0x4004_54d9;
const TUNGETDEVNETNS: u64 = 0x54e3;
const _: () = assert!(TUNSETIFF == crate::ioctl::write(b'T', 202, size_of::<c_int>()));
const _: () = assert!(TUNSETPERSIST == crate::ioctl::write(b'T', 203, size_of::<c_int>()));
const _: () = assert!(TUNGETIFF == crate::ioctl::read(b'T', 210, size_of::<c_int>()));
const _: () = assert!(TUNGETVNETHDRSZ == crate::ioctl::read(b'T', 215, size_of::<c_int>()));
const _: () = assert!(TUNSETQUEUE == crate::ioctl::write(b'T', 217, size_of::<c_int>()));
const _: () = assert!(TUNGETDEVNETNS == crate::ioctl::none(b'T', 227));

/// More than one read of a tap returns: a frame with segmentation left to the interface, and its header.
const MAX_READ_BYTES: usize = 128 << 10;
/// Most frames that wait in a queue: the largest `txqueuelen` that is usual.
const MAX_WAITING_FRAMES: usize = 16_384;

mod ioctl {
    #![allow(missing_docs)]
    nix::ioctl_write_ptr_bad!(tunsetiff, super::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(tunsetpersist, super::TUNSETPERSIST);
    nix::ioctl_read_bad!(tungetiff, super::TUNGETIFF, libc::ifreq);
    nix::ioctl_read_bad!(tungetvnethdrsz, super::TUNGETVNETHDRSZ, libc::c_int);
    nix::ioctl_write_ptr_bad!(tunsetqueue, super::TUNSETQUEUE, libc::ifreq);
    nix::ioctl_none_bad!(tungetdevnetns, super::TUNGETDEVNETNS);
}

/// What a tap passes besides frames, as flags of `TUNSETIFF`: the format of a frame, and whether it may have several
/// queues. A program that gets an open tap expects them to stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features(c_int);

impl Features {
    /// Those of a tap that Rekindle makes for a guest: virtio-net headers, one queue.
    pub const OWN: Self = Self(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
    /// Those of a tap that Rekindle makes for a guest whose card has several queues.
    pub const OWN_QUEUES: Self = Self(Self::OWN.0 | libc::IFF_MULTI_QUEUE);
    const ALL: c_int = Self::OWN_QUEUES.0;
}

/// A queue of a tap, as its open file shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// Name of the interface now: interfaces can be renamed.
    pub interface: String,
    /// Features that all queues of the interface have.
    pub features: Features,
    /// Whether the kernel gives it no frames ([`detach`]).
    pub is_detached: bool,
}

/// Returns what an open tap is.
///
/// # Errors
/// `EBADFD` if it has no interface; other errors if it is no tap.
pub fn queue(tap: BorrowedFd<'_>) -> io::Result<Queue> {
    let mut request = empty_request();
    // SAFETY: `request` is a whole `struct ifreq` that lives through the call, which writes name and flags into it.
    unsafe { ioctl::tungetiff(tap.as_raw_fd(), &raw mut request) }?;
    let name = request.ifr_name.map(|character| character as u8);
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    // SAFETY: TUNGETIFF has just written this field of the union.
    let flags = c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    Ok(Queue {
        interface: name.to_string_lossy().into_owned(),
        features: Features(flags & Features::ALL),
        is_detached: flags & libc::IFF_DETACH_QUEUE != 0,
    })
}

fn empty_request() -> libc::ifreq {
    // SAFETY: `struct ifreq` is integers and a pointer, for which zeroes are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Detaches a queue of a tap with several: the kernel gives it no more frames, and discards those that wait in it
/// ([`waiting_frames`]).
///
/// # Errors
/// `InvalidInput` if it is detached already, or if the tap has only one queue.
pub fn detach(tap: BorrowedFd<'_>) -> io::Result<()> {
    set_queue(tap, libc::IFF_DETACH_QUEUE)
}

/// Attaches a queue that was detached.
///
/// # Errors
/// `InvalidInput` if it is not detached.
pub fn attach(tap: BorrowedFd<'_>) -> io::Result<()> {
    set_queue(tap, libc::IFF_ATTACH_QUEUE)
}

fn set_queue(tap: BorrowedFd<'_>, flag: c_int) -> io::Result<()> {
    let mut request = empty_request();
    request.ifr_ifru.ifru_flags = flag as c_short;
    // SAFETY: `request` is a whole `struct ifreq` that lives through the call, which reads only the flags.
    unsafe { ioctl::tunsetqueue(tap.as_raw_fd(), &raw const request) }?;
    Ok(())
}

/// Takes the frames that wait in a queue of a tap.
///
/// # Errors
/// Of `read(2)`, or when it is no tap.
pub fn waiting_frames(tap: BorrowedFd<'_>) -> io::Result<Vec<Frame>> {
    let has_header = queue(tap)?.features.0 & libc::IFF_VNET_HDR != 0;
    let mut header_bytes: c_int = 0;
    if has_header {
        // SAFETY: the call writes an int to `header_bytes`, which lives through it.
        unsafe { ioctl::tungetvnethdrsz(tap.as_raw_fd(), &raw mut header_bytes) }?;
    }
    let (mut frames, mut buffer) = (Vec::new(), vec![0; MAX_READ_BYTES]);
    // Each queue has room for a few thousand frames: more than that have arrived meanwhile.
    while frames.len() < MAX_WAITING_FRAMES {
        let mut ready = [PollFd::from_borrowed_fd(tap, PollFlags::IN)];
        if poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
            break;
        }
        match rustix::io::read(tap, &mut buffer) {
            Ok(length) => frames.extend(Frame::of_tap(buffer.get(..length).unwrap_or_default(), header_bytes as usize)),
            Err(rustix::io::Errno::AGAIN) => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(frames)
}

/// Returns the network namespace in which the interface of an open tap is now.
///
/// # Errors
/// `PermissionDenied` without `CAP_NET_ADMIN` there; `EBADFD` if it has no interface; other errors if it is no tap.
pub fn namespace(tap: BorrowedFd<'_>) -> io::Result<Namespace> {
    // SAFETY: the call takes no argument and touches no memory of ours.
    let fd = unsafe { ioctl::tungetdevnetns(tap.as_raw_fd()) }?;
    // SAFETY: the kernel has just opened this descriptor, and nothing else has it.
    Ok(Namespace::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Opens the tap interface `name` in the network namespace of the calling thread, and creates it if it does not exist.
///
/// Returns a non-blocking descriptor for `-netdev tap,fd=`, with virtio-net headers. The interface is persistent: it
/// stays when the descriptor is closed, until [`remove`].
///
/// # Errors
/// `PermissionDenied` without `CAP_NET_ADMIN`; `ResourceBusy` while another process has the interface open;
/// `InvalidInput` for a name that is empty or longer than 15 bytes, and if the interface exists with other `features`. The
/// error names the interface. With [`Features::OWN_QUEUES`] an interface that another process has open is no error: each
/// call opens a queue of its own.
pub fn open(name: &str, features: Features) -> io::Result<OwnedFd> {
    open_interface(name, features, Some(true))
}

/// Creates a tap interface `name` that is removed when its last descriptor is closed.
///
/// # Errors
/// As for [`open`].
pub fn open_transient(name: &str, features: Features) -> io::Result<OwnedFd> {
    open_interface(name, features, None)
}

/// Removes a persistent tap interface. It is no error if the interface does not exist.
///
/// # Errors
/// As for [`open`]; an interface that is in use is not removed.
pub fn remove(name: &str, features: Features) -> io::Result<()> {
    drop(open_interface(name, features, Some(false))?);
    Ok(())
}

fn open_interface(name: &str, features: Features, persist: Option<bool>) -> io::Result<OwnedFd> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("tap interface {name}: {e}"));
    let mut request = link::request(name).map_err(named)?;
    let device = "/dev/net/tun";
    let fd = rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{device}: {e}")))?;
    request.ifr_ifru.ifru_flags = features.0 as c_short;
    // SAFETY: `request` is a whole `struct ifreq` whose name ends with a zero byte, and
    // it lives through the call.
    unsafe { ioctl::tunsetiff(fd.as_raw_fd(), &raw const request) }.map_err(|e| named(e.into()))?;
    if let Some(persist) = persist {
        // SAFETY: TUNSETPERSIST takes an int by value and touches no memory of ours.
        unsafe { ioctl::tunsetpersist(fd.as_raw_fd(), c_int::from(persist)) }.map_err(|e| named(e.into()))?;
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::process::Command;

    #[test]
    fn bad_names_are_refused() {
        for name in ["", "sixteen-letters-", "a/b"] {
            assert_eq!(open(name, Features::OWN).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }

    #[test]
    fn a_tap_is_made_once_held_once_and_removed() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkt{}", std::process::id());
        let held = open(&name, Features::OWN).unwrap();
        let refused = |features| open(&name, features).unwrap_err();
        assert_eq!(refused(Features::OWN).raw_os_error(), None, "the error carries the name");
        assert_eq!(refused(Features::OWN).kind(), io::ErrorKind::ResourceBusy);
        assert_eq!(refused(Features::OWN_QUEUES).kind(), io::ErrorKind::InvalidInput);
        drop(held);
        assert!(std::path::Path::new("/sys/class/net").join(&name).exists(), "it is persistent");
        remove(&name, Features::OWN).unwrap();
        assert!(!std::path::Path::new("/sys/class/net").join(&name).exists());
    }

    #[test]
    fn an_open_tap_shows_what_it_is_and_where() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkq{}", std::process::id());
        for features in [Features::OWN, Features(libc::IFF_TAP | libc::IFF_NO_PI), Features(Features::ALL)] {
            let tap = open_transient(&name, features).unwrap();
            let shown = Queue { interface: name.clone(), features, is_detached: false };
            assert_eq!(queue(tap.as_fd()).unwrap(), shown);
            let index = |name: String| {
                let socket = link::socket().unwrap();
                rustix::net::netdevice::name_to_index(&socket, &name)
            };
            let here = index(name.clone()).unwrap();
            let moved = name.clone();
            assert_eq!(namespace(tap.as_fd()).unwrap().run(move || index(moved)).unwrap().unwrap(), here);
        }
        let no_tap = std::fs::File::open("/dev/null").unwrap();
        assert!(queue(no_tap.as_fd()).is_err() && namespace(no_tap.as_fd()).is_err());
    }

    #[test]
    fn a_detached_queue_gets_no_frames_and_those_that_waited_can_be_taken() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkd{}", std::process::id());
        let tap = open_transient(&name, Features(Features::ALL)).unwrap();
        let ip = |arguments: &str| {
            let arguments = arguments.replace("DEV", &name);
            assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
        };
        ip("addr add 198.51.100.5/30 dev DEV");
        ip("link set DEV up");
        ip("neigh add 198.51.100.6 lladdr 02:00:00:00:00:01 dev DEV");
        let socket = std::net::UdpSocket::bind("198.51.100.5:0").unwrap();
        let send = |text: &[u8]| assert!(socket.send_to(text, "198.51.100.6:9").is_ok());
        let has = |frames: &[Frame], text: &[u8]| {
            frames.iter().any(|frame| frame.bytes().windows(text.len()).any(|part| part == text))
        };
        send(b"that waits");
        assert!(has(&waiting_frames(tap.as_fd()).unwrap(), b"that waits"));
        detach(tap.as_fd()).unwrap();
        assert!(queue(tap.as_fd()).unwrap().is_detached);
        assert_eq!(detach(tap.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        send(b"that is lost");
        attach(tap.as_fd()).unwrap();
        assert_eq!(attach(tap.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        send(b"that arrives");
        let frames = waiting_frames(tap.as_fd()).unwrap();
        assert!(has(&frames, b"that arrives") && !has(&frames, b"that is lost"));
    }

    #[test]
    fn a_tap_is_found_in_the_namespace_to_which_its_interface_was_moved() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkm{}", std::process::id());
        let ip = |arguments: &str| {
            let arguments = arguments.replace("NAME", &name);
            assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
        };
        let tap = open_transient(&name, Features::OWN).unwrap();
        ip("netns add NAME");
        ip("link set NAME netns NAME");
        let has_it = || rustix::net::netdevice::name_to_index(link::socket().unwrap(), &name).is_ok();
        assert!(!has_it());
        let there = name.clone();
        let is_there = move || rustix::net::netdevice::name_to_index(link::socket().unwrap(), &there).is_ok();
        assert!(namespace(tap.as_fd()).unwrap().run(is_there).unwrap());
        drop(tap);
        ip("netns del NAME");
    }
}
