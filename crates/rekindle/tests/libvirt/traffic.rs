//! Traffic between a test and the guest of a domain, which shows whether many frames are lost.

use rekindle_testing::libvirt::Domain;
use rekindle_testing::traffic::Worker;
use rekindle_testing::{DEADLINE, poll};
use rustix::fd::OwnedFd;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, recv, sendto, socket};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddrV4};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Time between two pings. A tap has room for 1000 frames: none is lost in a pause of up to 5 s.
const PING_INTERVAL: Duration = Duration::from_millis(5);
/// How often the receiver of pings checks whether it shall end.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(100);
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;
const IP_HEADER_BYTES: usize = 20;
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
/// Identifier of the pings, which are alone in the test's network.
const PING_ID: [u8; 2] = *b"rk";

/// Pings that one replacement may lose. A QEMU that has to wait for a processor reads frames long before its guest gets
/// them, and such frames are sent again only as far as they are known. TCP sends them again in any case.
const MAX_LOST_PINGS: usize = 2;

/// Numbered pings, one every [`PING_INTERVAL`].
pub(crate) struct Pings {
    /// Returns the number of pings.
    sender: Worker<u32>,
    receiver: Worker<()>,
    replies: Arc<Mutex<BTreeSet<u32>>>,
}

impl Pings {
    pub(crate) fn begin(domain: &Domain<'_>) -> Self {
        let IpAddr::V4(address) = domain.address.ip() else { panic!("an IPv4 address") };
        let target = SocketAddrV4::new(address, 0);
        let (outgoing, incoming) = (open_socket(), open_socket());
        let replies: Arc<Mutex<BTreeSet<u32>>> = Arc::default();
        let received = Arc::clone(&replies);
        let receiver = Worker::begin(move |is_finished| {
            let mut buffer = [0; 256];
            while !is_finished.load(Ordering::SeqCst) {
                let Ok((_, bytes)) = recv(&incoming, &mut buffer, RecvFlags::empty()) else { continue };
                received.lock().unwrap().extend(reply(&buffer[..bytes]));
            }
        });
        let sender = Worker::begin(move |is_finished| {
            let mut number = 0;
            while !is_finished.load(Ordering::SeqCst) {
                sendto(&outgoing, &request(number), SendFlags::empty(), &target).unwrap();
                number += 1;
                thread::sleep(PING_INTERVAL);
            }
            number
        });
        Self { sender, receiver, replies }
    }

    /// Checks that all pings have replies, but for the few that one replacement may lose.
    pub(crate) fn assert_few_lost(self) {
        let sent = self.sender.finish();
        let missing = || (0..sent).filter(|number| !self.replies.lock().unwrap().contains(number)).collect::<Vec<_>>();
        let are_few_lost = poll(DEADLINE, || (missing().len() <= MAX_LOST_PINGS).then_some(())).is_some();
        self.receiver.finish();
        assert!(sent > 0 && are_few_lost, "{sent} pings; without a reply: {:?}", missing());
    }
}

fn open_socket() -> OwnedFd {
    let socket = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
    set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(RECEIVE_TIMEOUT)).unwrap();
    socket
}

/// Returns the ICMP message of a ping.
fn request(number: u32) -> [u8; 12] {
    let mut message = [0; 12];
    message[0] = ECHO_REQUEST;
    message[4..6].copy_from_slice(&PING_ID);
    message[8..].copy_from_slice(&number.to_be_bytes());
    let sum: u32 = message.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}

/// Returns the number of the ping to which an IP packet replies.
fn reply(packet: &[u8]) -> Option<u32> {
    let message = packet.get(IP_HEADER_BYTES..)?;
    let is_reply = message.first() == Some(&ECHO_REPLY) && message.get(4..6) == Some(&PING_ID);
    let number = message.get(8..12)?.try_into().ok()?;
    is_reply.then(|| u32::from_be_bytes(number))
}
