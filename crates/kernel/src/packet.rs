//! Frames sent into a network interface: capturing them, and sending them again.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Size of `struct virtio_net_hdr`, which precedes each frame. With it, checksums and segmentation that the sender left
/// to the interface are still left to it when the frame is sent again.
const VNET_HEADER_BYTES: usize = 10;
/// Largest frame in bytes, with segmentation left to the interface.
const MAX_FRAME_BYTES: usize = 65536 + 64 + VNET_HEADER_BYTES;
/// Size of the receive buffer in bytes: room for the frames between two reads.
const RECEIVE_BUFFER_BYTES: libc::c_int = 8 << 20;
/// The least bytes of the receive buffer that one frame occupies.
const MIN_BYTES_PER_FRAME: usize = 768;
/// Capacity of the receive buffer: the kernel doubles the requested size.
const BUFFER_CAPACITY_BYTES: usize = 2 * RECEIVE_BUFFER_BYTES as usize;

/// One captured frame with its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Time of the capture: microseconds of the host's clock since 1970. 0 if it was not captured.
    pub host_us: u64,
    bytes: Vec<u8>,
}

impl Frame {
    /// Makes a frame of what a tap's reader has read: `header_bytes` of a virtio-net header, which may be 0, and the frame.
    /// `None` if nothing follows the header.
    pub fn of_tap(read: &[u8], header_bytes: usize) -> Option<Self> {
        let (header, frame) = read.split_at_checked(header_bytes).filter(|(_, frame)| !frame.is_empty())?;
        let mut bytes = vec![0; VNET_HEADER_BYTES];
        // A longer header has a number of buffers at its end, which only a guest understands.
        bytes.iter_mut().zip(header).for_each(|(byte, given)| *byte = *given);
        bytes.extend_from_slice(frame);
        Some(Self { host_us: 0, bytes })
    }

    /// Returns the frame, after a virtio-net header of 10 bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A frame that was received into a buffer.
struct ReceivedFrame {
    /// Whether the host sent it into the interface.
    is_outgoing: bool,
    /// Time since 1970 by the host's clock.
    time: Duration,
    /// Its length with the header, which may be more than the buffer has.
    bytes: usize,
}

/// A capture of the frames that the host sends into an interface, from the opening of the capture on.
#[derive(Debug)]
pub struct Capture {
    socket: OwnedFd,
}

impl Capture {
    /// Starts to capture on the interface `name` in the network namespace of the calling thread. Needs `CAP_NET_RAW`.
    ///
    /// # Errors
    /// Fails for a missing interface; `PermissionDenied` without `CAP_NET_RAW`. The error names the
    /// interface.
    pub fn open(name: &str) -> io::Result<Self> {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("frames into {name}: {e}"));
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // Protocol 0: nothing is received before the bind below names interface and protocol.
        // SAFETY: socket() takes no pointers; a descriptor that it returns is ours alone.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(named(io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just made by socket() and nothing else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let capture = Self { socket };
        capture.set_option(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1).map_err(named)?;
        capture.set_option(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1).map_err(named)?;
        if capture.set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES).is_err() {
            capture.set_option(libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER_BYTES).map_err(named)?;
        }
        let index = rustix::net::netdevice::name_to_index(&capture.socket, name).map_err(|e| named(e.into()))?;
        // SAFETY: sockaddr_ll is plain integers, for which zeroes are valid.
        let mut address: libc::sockaddr_ll = unsafe { MaybeUninit::zeroed().assume_init() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        // SAFETY: `address` is a whole sockaddr_ll, its length is given, and it lives through the call.
        let bound = unsafe {
            libc::bind(
                capture.socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if bound == 0 { Ok(capture) } else { Err(named(io::Error::last_os_error())) }
    }

    fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the option takes an int; pointer and length describe `value`, which lives through the call.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the frames that the host has sent into the interface since the last call, in order. Frames that the
    /// interface has received are left out.
    ///
    /// Returns at most as many frames as the buffer can hold, so that a network that sends as fast as frames are read
    /// does not keep the caller in this function.
    ///
    /// # Errors
    /// `ENETDOWN` when the interface was removed or set down; other errors of `recvmsg(2)`.
    pub fn frames(&self) -> io::Result<Vec<Frame>> {
        self.some_frames(BUFFER_CAPACITY_BYTES)
    }

    /// Returns frames that together occupy about `max_bytes` of the buffer.
    fn some_frames(&self, max_bytes: usize) -> io::Result<Vec<Frame>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0u8; MAX_FRAME_BYTES];
        let mut bytes_received = 0;
        while bytes_received < max_bytes
            && let Some(received) = self.receive(&mut buffer)?
        {
            bytes_received += received.bytes.max(MIN_BYTES_PER_FRAME);
            if received.is_outgoing && received.bytes > VNET_HEADER_BYTES {
                let bytes = buffer.get(..received.bytes.min(MAX_FRAME_BYTES)).unwrap_or_default().to_vec();
                frames.push(Frame { host_us: u64::try_from(received.time.as_micros()).unwrap_or(u64::MAX), bytes });
            }
        }
        Ok(frames)
    }

    /// Receives one frame into `buffer`; `None` if none is waiting.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<ReceivedFrame>> {
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // An array of `u64`, because control messages must be aligned.
        let mut control = [0u64; 16];
        // SAFETY: sockaddr_ll and msghdr are plain integers and pointers, for which zeroes are valid.
        let (mut address, mut message): (libc::sockaddr_ll, libc::msghdr) =
            unsafe { (MaybeUninit::zeroed().assume_init(), MaybeUninit::zeroed().assume_init()) };
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in `message` is to a local that lives through the call, with its true length.
        let len = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        if len < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(e) };
        }
        let mut time = Duration::ZERO;
        // SAFETY: the CMSG functions walk `control`, which the kernel has filled up to `msg_controllen`; a timestamp
        // message holds a timespec, read unaligned.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
                    let stamp = libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned();
                    time = Duration::new(stamp.tv_sec as u64, stamp.tv_nsec as u32);
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        let is_outgoing = address.sll_pkttype == libc::PACKET_OUTGOING;
        Ok(Some(ReceivedFrame { is_outgoing, time, bytes: len as usize }))
    }

    /// Sends a captured frame into the interface again.
    ///
    /// # Errors
    /// `ENETDOWN` or `ENXIO` when the interface is down or was removed.
    pub fn send(&self, frame: &Frame) -> io::Result<()> {
        rustix::net::send(&self.socket, &frame.bytes, rustix::net::SendFlags::empty())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::Command;

    #[test]
    fn a_frame_into_a_tap_is_seen_and_can_be_sent_once_more() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkp{}", std::process::id());
        let tap = crate::tap::open_transient(&name, crate::tap::Features::OWN).unwrap();
        let ip = |arguments: &str| {
            let arguments = arguments.replace("DEV", &name);
            assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
        };
        ip("addr add 198.51.100.1/30 dev DEV");
        ip("link set DEV up");
        ip("neigh add 198.51.100.2 lladdr 02:00:00:00:00:01 dev DEV");
        let capture = Capture::open(&name).unwrap();
        let mark = b"once and once more";
        std::net::UdpSocket::bind("198.51.100.1:0").unwrap().send_to(mark, "198.51.100.2:9").unwrap();
        let has_mark = |bytes: &[u8]| bytes.windows(mark.len()).any(|part| part == mark);
        let frames = capture.frames().unwrap();
        let frame = frames.iter().find(|frame| has_mark(&frame.bytes)).unwrap();
        assert!(frame.host_us > 1_700_000_000_000_000, "{}", frame.host_us);
        capture.send(frame).unwrap();
        let mut tap = std::fs::File::from(tap);
        let mut buffer = vec![0; 4096];
        let mut seen = 0;
        while let Ok(n) = tap.read(&mut buffer) {
            seen += usize::from(has_mark(&buffer[..n]));
        }
        assert_eq!(seen, 2);
        // More frames than one limited read takes.
        let socket = std::net::UdpSocket::bind("198.51.100.1:0").unwrap();
        (0..20).for_each(|_| assert!(socket.send_to(mark, "198.51.100.2:9").is_ok()));
        let few = capture.some_frames(5 * MIN_BYTES_PER_FRAME).unwrap();
        assert!(few.len() <= 5, "{} frames", few.len());
        let marked = |frames: &[Frame]| frames.iter().filter(|frame| has_mark(&frame.bytes)).count();
        assert_eq!(marked(&few) + marked(&capture.frames().unwrap()), 20);
    }
}
