//! A front end that uses vhost-user like QEMU, and whose rings can have any content.

use super::{DEADLINE, wait_for};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const QUEUES: u16 = 2;
/// Bytes of the guest's memory.
pub const MEMORY: u64 = 4 << 20;
/// Address of that memory in the front end.
pub const FRONT_END_ADDRESS: u64 = 0x7f00_0000_0000;
/// Addresses of requests' headers and data.
pub const HEADER: u64 = 0x20_0000;
pub const STATUS: u64 = 0x20_0100;
pub const DATA: u64 = 0x21_0000;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;

/// All features that a server may offer, except the log of writes and notification suppression.
pub const ALL_FEATURES: u64 = !(1 << 26) & !(1 << 29);
/// `MQ`, `LOG_SHMFD`, `REPLY_ACK`, `BACKEND_REQ`, `CONFIG`, `INFLIGHT_SHMFD`.
pub const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12;

/// Requests of vhost-user.
pub mod ask {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// A number above the last request.
    pub const END: u32 = 46;
}

const VERSION: u32 = 1;

/// The connection, the memory and the rings of one front end.
pub struct Peer {
    stream: UnixStream,
    /// A malformed message was sent: the server cannot parse later messages.
    pub is_confused: bool,
    pub memory: File,
    kicks: Vec<OwnedFd>,
    pub calls: Vec<OwnedFd>,
    pub inflight: Option<(Vec<u8>, OwnedFd)>,
    pub available: [u16; QUEUES as usize],
    pub sizes: [u16; QUEUES as usize],
}

/// Returns the addresses of a queue's rings: descriptors, available, used.
pub fn rings(queue: u16) -> (u64, u64, u64) {
    let at = 0x1_0000 + u64::from(queue) * 0x1_0000;
    (at, at + 0x8000, at + 0xc000)
}

/// Returns the bytes of numbers in a message.
pub fn message<const N: usize>(numbers: [u64; N]) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Returns the bytes of a queue's number and another number.
pub fn state(queue: u32, number: u32) -> Vec<u8> {
    [queue, number].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Returns the guest's memory as a table of one region.
pub fn table(address: u64, bytes: u64, front: u64, offset: u64) -> Vec<u8> {
    [state(1, 0), message([address, bytes, front, offset])].concat()
}

impl Peer {
    pub fn connect(socket: &Path) -> Self {
        let stream = wait_for("a connection", || UnixStream::connect(socket).ok());
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY).unwrap();
        let event = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kicks, calls) = ((0..QUEUES).map(event).collect(), (0..QUEUES).map(event).collect());
        let (available, sizes) = ([0; QUEUES as usize], [64; QUEUES as usize]);
        Self { stream, is_confused: false, memory, kicks, calls, inflight: None, available, sizes }
    }

    /// Sends a message. Returns `false` if the connection is closed.
    pub fn send(&mut self, request: u32, flags: u32, len: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let header: Vec<u8> = [request, flags, len].into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        self.is_confused |= len as usize != body.len();
        let parts = [IoSlice::new(&header), IoSlice::new(body)];
        // A fuzzer has a timer, whose signal interrupts a wait.
        match retry_on_intr(|| sendmsg(&self.stream, &parts, &mut ancillary, SendFlags::NOSIGNAL)) {
            Ok(sent) => sent == header.len() + body.len(),
            Err(rustix::io::Errno::AGAIN) => panic!("the server has not read for {DEADLINE:?}"),
            Err(_) => false,
        }
    }

    /// Sends a well-formed message.
    pub fn send_valid(&mut self, request: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        self.send(request, VERSION, body.len() as u32, body, descriptors)
    }

    /// Sends a message and waits for the answer. `None`: the connection is closed.
    pub fn ask(&mut self, request: u32, body: &[u8]) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        if !self.send_valid(request, body, &[]) {
            return None;
        }
        loop {
            let (found, answer, descriptor) = self.receive()?;
            if found == request {
                return Some((answer, descriptor));
            }
        }
    }

    fn receive(&mut self) -> Option<(u32, Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
        let received = match retry_on_intr(|| recvmsg(&self.stream, &mut parts, &mut ancillary, flags)) {
            Err(rustix::io::Errno::AGAIN) => panic!("the server has not answered for {DEADLINE:?}"),
            other => other.ok()?.bytes,
        };
        if received < 12 {
            return None;
        }
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let number = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let mut body = vec![0; number(8) as usize];
        match (&self.stream).read_exact(&mut body) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => panic!("half an answer, for {DEADLINE:?}"),
            other => other.ok()?,
        }
        Some((number(0), body, descriptor))
    }

    /// Negotiates features and passes the memory. Returns `false` if the connection is closed.
    pub fn introduce(&mut self, features: u64, tracks: bool) -> bool {
        let Some((offered, _)) = self.ask(ask::GET_FEATURES, &[]) else { return false };
        let offered = u64::from_ne_bytes(offered[..8].try_into().unwrap());
        let _ = self.ask(ask::GET_PROTOCOL_FEATURES, &[]);
        // Without `REPLY_ACK`: a program must not wait for each of its steps.
        self.send_valid(ask::SET_PROTOCOL_FEATURES, &message([PROTOCOL & !(1 << 3)]), &[]);
        self.send_valid(ask::SET_OWNER, &[], &[]);
        self.send_valid(ask::SET_FEATURES, &message([offered & features]), &[]);
        let memory = self.memory.try_clone().unwrap();
        let is_open = self.send_valid(ask::SET_MEM_TABLE, &table(0, MEMORY, FRONT_END_ADDRESS, 0), &[memory.as_fd()]);
        if tracks && is_open {
            let about = [message([0, 0]), QUEUES.to_ne_bytes().to_vec(), 1024u16.to_ne_bytes().to_vec(), vec![0; 4]];
            let Some((about, Some(file))) = self.ask(ask::GET_INFLIGHT_FD, &about.concat()[..]) else { return false };
            self.inflight = Some((about, file));
            return self.track();
        }
        is_open
    }

    /// Passes the memory of requests in progress. Returns `false` if the connection is closed.
    pub fn track(&mut self) -> bool {
        let Some((about, file)) = self.inflight.take() else { return true };
        let is_open = self.send_valid(ask::SET_INFLIGHT_FD, &about, &[file.as_fd()]);
        self.inflight = Some((about, file));
        is_open
    }

    /// Starts a queue.
    pub fn set_up_queue(&mut self, queue: u16, size: u16, base: u16) -> bool {
        self.sizes[usize::from(queue)] = size;
        let (descriptors, available, used) = rings(queue);
        let number = u32::from(queue);
        let address =
            message([FRONT_END_ADDRESS + descriptors, FRONT_END_ADDRESS + used, FRONT_END_ADDRESS + available, 0]);
        let event = |events: &[OwnedFd]| events[usize::from(queue)].try_clone().unwrap();
        let (kick, call) = (event(&self.kicks), event(&self.calls));
        self.send_valid(ask::SET_VRING_NUM, &state(number, size.into()), &[]);
        self.send_valid(ask::SET_VRING_BASE, &state(number, base.into()), &[]);
        self.send_valid(ask::SET_VRING_ADDR, &[state(number, 0), address].concat(), &[]);
        self.send_valid(ask::SET_VRING_CALL, &message([queue.into()]), &[call.as_fd()]);
        self.send_valid(ask::SET_VRING_ERR, &message([queue.into()]), &[call.as_fd()]);
        self.send_valid(ask::SET_VRING_KICK, &message([queue.into()]), &[kick.as_fd()]);
        self.send_valid(ask::SET_VRING_ENABLE, &state(number, 1), &[])
    }

    /// Stops a queue and returns the next index of its available ring. `None`: the connection is closed.
    pub fn stop_queue(&mut self, queue: u16) -> Option<u16> {
        if self.is_confused {
            return None;
        }
        let (answer, _) = self.ask(ask::GET_VRING_BASE, &state(queue.into(), 0))?;
        Some(u16::from_ne_bytes([answer[4], answer[5]]))
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        let at = at % MEMORY;
        let len = bytes.len().min((MEMORY - at) as usize);
        self.memory.write_all_at(&bytes[..len], at).unwrap();
    }

    pub fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn write_descriptor(&self, table: u64, number: u16, (address, len, flags, next): (u64, u32, u16, u16)) {
        let raw = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.write(table + u64::from(number) * 16, &raw);
    }

    /// Puts a chain that begins with descriptor `head` into the available ring.
    pub fn offer(&mut self, queue: u16, head: u16) {
        let (_, available, _) = rings(queue);
        let (size, index) = (self.sizes[usize::from(queue)].max(1), &mut self.available[usize::from(queue)]);
        let place = available + 4 + u64::from(*index % size) * 2;
        *index = index.wrapping_add(1);
        let index = *index;
        self.write(place, &head.to_le_bytes());
        self.write(available + 2, &index.to_le_bytes());
    }

    /// Adds a request as a driver does.
    pub fn add_request(&mut self, queue: u16, kind: u32, sector: u64, data: u64, len: u32) {
        let (descriptors, _, _) = rings(queue);
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.write(HEADER, &header);
        self.write(STATUS, &[0xff]);
        let writable = if kind == READ { 2 } else { 0 };
        self.write_descriptor(descriptors, 0, (HEADER, 16, 1, if len > 0 { 1 } else { 2 }));
        self.write_descriptor(descriptors, 1, (data, len, 1 | writable, 2));
        self.write_descriptor(descriptors, 2, (STATUS, 1, 2, 0));
        self.offer(queue, 0);
    }

    pub fn status(&self) -> u8 {
        self.read::<1>(STATUS)[0]
    }

    pub fn used(&self, queue: u16) -> u16 {
        let (_, _, used) = rings(queue);
        u16::from_le_bytes(self.read(used + 2))
    }

    pub fn kick(&self, queue: u16) {
        let _ = rustix::io::write(&self.kicks[usize::from(queue)], &1u64.to_ne_bytes());
    }
}
