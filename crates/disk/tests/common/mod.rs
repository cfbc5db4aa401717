//! A guest without a processor: memory, queues, and a vhost-user front end.

#![allow(dead_code, reason = "each test uses what it needs")]

use rekindle_disk::control::{Control, ControlCommand};
use rekindle_disk::engine::Settings;
use rekindle_disk::image::OpenMode;
use rekindle_disk::keeper::LogOptions;
use rekindle_disk::limit::Limits;
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{ServeError, Service, serve};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Far longer than any wait takes, also on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(30);
pub const PAGE: u64 = 4096;
/// Address of the guest's memory in the front end.
pub const FRONT_END_ADDRESS: u64 = 0x7f00_0000_0000;
/// Requests per queue.
pub const QUEUE_ENTRIES: u16 = 64;
/// Descriptors that each request has space for.
const DESCRIPTORS_PER_REQUEST: u16 = 4;
/// Frames (pages of memory) of a guest: 16 MiB.
pub const GUEST_FRAMES: u64 = 4096;
/// The first frame after rings and headers.
pub const FIRST_FREE_FRAME: u64 = 256;

/// The state of the rings of a queue that starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingState {
    /// As the guest's driver makes them when it starts.
    Empty,
    /// With the requests and answers from before the queue was stopped.
    Kept,
}

/// A disk that a thread of this process serves.
pub struct Disk {
    pub directory: tempfile::TempDir,
    pub image: PathBuf,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

/// `VIRTIO_BLK_T_*`: the type of a request.
pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Returns the options to open a log with this version of the disk.
pub fn log_options(version: DiskVersion) -> LogOptions {
    LogOptions { version, ..LogOptions::default() }
}

pub fn service(directory: &Path, image: &Path) -> Service {
    let settings = Settings {
        serial: "rekindle-test".into(),
        limits: Limits::default(),
        has_block_map: true,
        queues: 4,
        retain_for: None,
        is_filling: Arc::default(),
    };
    let mode = OpenMode { readonly: false, direct: true };
    Service {
        image: image.to_owned(),
        mode,
        socket: directory.join("disk.sock"),
        user: None,
        control: directory.join("disk.control"),
        redo: log_options(DiskVersion::Newest),
        settings,
        is_awaiting_epoch: false,
        confine: false,
    }
}

impl Disk {
    /// Creates a disk of `blocks` blocks, each with its number as content.
    pub fn new(blocks: u64) -> Self {
        Self::with(blocks, |_| {})
    }

    pub fn with(blocks: u64, change: impl FnOnce(&mut Service)) -> Self {
        // Not in /tmp, which may be a tmpfs: the disk is used with O_DIRECT.
        let directory = tempfile::Builder::new().prefix("disk-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = directory.path().join("disk.raw");
        let file = File::create(&image).unwrap();
        for block in 0..blocks {
            file.write_all_at(&content(block, 0), block * PAGE).unwrap();
        }
        file.sync_all().unwrap();
        let mut disk = Self { directory, image, thread: None };
        disk.serve(change);
        disk
    }

    pub fn service(&self) -> Service {
        service(self.directory.path(), &self.image)
    }

    pub fn serve(&mut self, change: impl FnOnce(&mut Service)) {
        self.serve_after(change, || ());
    }

    /// Starts the server. Its thread calls `prepare` before.
    pub fn serve_after(&mut self, change: impl FnOnce(&mut Service), prepare: impl FnOnce() + Send + 'static) {
        let mut service = self.service();
        change(&mut service);
        let (ready, is_ready) = channel();
        self.thread = Some(thread::spawn(move || {
            prepare();
            serve(service, |_| ready.send(()).unwrap())
        }));
        match is_ready.recv_timeout(DEADLINE) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => panic!("the server does not begin"),
            Err(RecvTimeoutError::Disconnected) => panic!("{:?}", self.thread.take().map(JoinHandle::join)),
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.service().socket
    }

    pub fn control(&self) -> Control {
        Control::connect(&self.service().control).unwrap()
    }

    /// Returns the content of a block on the disk.
    pub fn block(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE as usize];
        File::open(&self.image).unwrap().read_exact_at(&mut bytes, block * PAGE).unwrap();
        bytes
    }

    pub fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.control().ask::<()>(&ControlCommand::End {}).unwrap();
            thread.join().unwrap().unwrap();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end();
        }
    }
}

/// Returns the content of a block after `version` writes.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    let words = (0..PAGE / 8).map(|n| (block << 32 | version << 16 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Waits until `poll` returns a value.
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A queue as its driver sees it.
struct Queue {
    kick: EventFd,
    call: EventFd,
    error: EventFd,
    /// Index of the next entry of the available ring.
    available: u16,
    /// Index of the next entry of the used ring to read.
    used: u16,
    free_slots: Vec<u16>,
}

/// The addresses of a queue's rings in the guest.
struct RingAddresses {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// A guest's memory and its driver.
pub struct Guest {
    pub memory: File,
    pub front: Frontend,
    queues: Vec<Queue>,
    pub inflight: Option<(VhostUserInflight, File)>,
    /// Address of the status of each request in progress, by queue and head.
    status_addresses: BTreeMap<(u16, u16), u64>,
}

/// A request as the driver makes it.
pub struct GuestRequest {
    /// `VIRTIO_BLK_T_*`.
    pub kind: u32,
    pub sector: u64,
    pub data: Vec<DataPiece>,
}

/// A piece of a request's data in the guest's memory.
#[derive(Debug, Clone, Copy)]
pub struct DataPiece {
    pub address: u64,
    pub len: u32,
    /// The device writes the piece.
    pub is_writable: bool,
}

impl DataPiece {
    /// Returns a piece that the device reads.
    pub fn readable(address: u64, len: u64) -> Self {
        Self { address, len: len as u32, is_writable: false }
    }

    /// Returns a piece that the device writes.
    pub fn writable(address: u64, len: u64) -> Self {
        Self { address, len: len as u32, is_writable: true }
    }
}

/// A request that the device has completed.
#[derive(Debug, Clone, Copy)]
pub struct CompletedRequest {
    /// The first descriptor.
    pub head: u16,
    /// Bytes that the device has written.
    pub written: u32,
    pub status: u8,
}

impl GuestRequest {
    pub fn read(block: u64, frame: u64) -> Self {
        Self { kind: IN, sector: block * 8, data: vec![DataPiece::writable(frame * PAGE, PAGE)] }
    }

    pub fn write(block: u64, frame: u64) -> Self {
        Self { kind: OUT, sector: block * 8, data: vec![DataPiece::readable(frame * PAGE, PAGE)] }
    }

    pub fn flush() -> Self {
        Self { kind: FLUSH, sector: 0, data: Vec::new() }
    }
}

impl Guest {
    /// Starts a guest with fresh memory and running queues.
    pub fn start(socket: &Path) -> Self {
        let mut guest = Self::connect(socket, memory(), 1);
        guest.run(0, RingState::Empty);
        guest
    }

    /// Connects a guest, of which only features and memory are set up.
    pub fn connect(socket: &Path, memory: File, queues: u16) -> Self {
        let front = wait_for("the server", || Frontend::connect(socket, queues.into()).ok());
        let queue = || Queue {
            kick: EventFd::new(0).unwrap(),
            call: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            error: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            available: 0,
            used: 0,
            free_slots: (0..QUEUE_ENTRIES / DESCRIPTORS_PER_REQUEST).rev().collect(),
        };
        let queues = (0..queues).map(|_| queue()).collect();
        let mut guest = Self { memory, front, queues, inflight: None, status_addresses: BTreeMap::new() };
        guest.negotiate();
        guest
    }

    fn negotiate(&mut self) {
        let features = self.front.get_features().unwrap();
        self.front.set_owner().unwrap();
        let protocol = self.front.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        assert_eq!(protocol & wanted, wanted);
        self.front.set_protocol_features(wanted).unwrap();
        self.front.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        // All but the log of writes, and notification suppression.
        self.front.set_features(features & !(1 << 26) & !(1 << 29)).unwrap();
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: GUEST_FRAMES * PAGE,
            userspace_addr: FRONT_END_ADDRESS,
            mmap_offset: 0,
            mmap_handle: self.memory.as_raw_fd(),
        };
        self.front.set_mem_table(&[region]).unwrap();
    }

    /// Passes a channel for the server's notifications. Returns the other end.
    pub fn listen(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(DEADLINE)).unwrap();
        self.front.set_backend_request_fd(&theirs).unwrap();
        ours
    }

    /// Passes memory for requests in progress: new or existing.
    pub fn track(&mut self) {
        let queues = self.queues.len() as u16;
        let (about, file) = match self.inflight.take() {
            Some(kept) => kept,
            None => self.front.get_inflight_fd(&VhostUserInflight::new(0, 0, queues, QUEUE_ENTRIES)).unwrap(),
        };
        self.front.set_inflight_fd(&about, file.as_raw_fd()).unwrap();
        self.inflight = Some((about, file));
    }

    fn rings(queue: u16) -> RingAddresses {
        let first = PAGE + u64::from(queue) * 4 * PAGE;
        RingAddresses { descriptors: first, available: first + PAGE, used: first + 2 * PAGE }
    }

    /// Starts a queue.
    pub fn run(&mut self, queue: u16, rings: RingState) {
        self.try_run(queue, rings).unwrap();
    }

    pub fn try_run(&mut self, number: u16, rings: RingState) -> Result<(), vhost::Error> {
        if rings == RingState::Empty {
            let RingAddresses { descriptors, .. } = Self::rings(number);
            self.memory.write_all_at(&vec![0; 3 * PAGE as usize], descriptors).unwrap();
            let queue = &mut self.queues[usize::from(number)];
            (queue.available, queue.used) = (0, 0);
        }
        // As QEMU does if the server did not report its position.
        let base = self.queues[usize::from(number)].used;
        self.run_from(number, base)
    }

    /// Starts a queue at entry `base` of its available ring.
    pub fn run_from(&mut self, number: u16, base: u16) -> Result<(), vhost::Error> {
        let RingAddresses { descriptors, available, used } = Self::rings(number);
        let queue = &mut self.queues[usize::from(number)];
        let index = usize::from(number);
        self.front.set_vring_num(index, QUEUE_ENTRIES)?;
        self.front.set_vring_base(index, base)?;
        let config = VringConfigData {
            queue_max_size: QUEUE_ENTRIES,
            queue_size: QUEUE_ENTRIES,
            flags: 0,
            desc_table_addr: FRONT_END_ADDRESS + descriptors,
            used_ring_addr: FRONT_END_ADDRESS + used,
            avail_ring_addr: FRONT_END_ADDRESS + available,
            log_addr: None,
        };
        self.front.set_vring_addr(index, &config)?;
        self.front.set_vring_call(index, &queue.call)?;
        self.front.set_vring_err(index, &queue.error)?;
        self.front.set_vring_kick(index, &queue.kick)?;
        self.front.set_vring_enable(index, true)
    }

    /// Continues with the rings of another front end of the same guest.
    pub fn continue_from(&mut self, other: &Self) {
        for (ours, theirs) in self.queues.iter_mut().zip(&other.queues) {
            (ours.available, ours.used, ours.free_slots) = (theirs.available, theirs.used, theirs.free_slots.clone());
        }
        self.status_addresses = other.status_addresses.clone();
    }

    pub fn stop(&mut self, queue: u16) -> u32 {
        self.front.get_vring_base(queue.into()).unwrap()
    }

    /// Connects to the server that replaces a killed one.
    pub fn reconnect(&mut self, socket: &Path) {
        let queues = self.queues.len() as u16;
        self.front = wait_for("the server", || Frontend::connect(socket, queues.into()).ok());
        self.negotiate();
        self.track();
        for queue in 0..queues {
            self.run(queue, RingState::Kept);
        }
    }

    /// Adds a request to a queue. Returns its first descriptor.
    pub fn add_request(&mut self, number: u16, request: &GuestRequest) -> u16 {
        let RingAddresses { descriptors, available, .. } = Self::rings(number);
        let queue = &mut self.queues[usize::from(number)];
        let slot = queue.free_slots.pop().expect("room in the queue");
        let head = slot * DESCRIPTORS_PER_REQUEST;
        // Headers and statuses are after the rings.
        let header_address = 64 * PAGE + (u64::from(number) * u64::from(QUEUE_ENTRIES) + u64::from(slot)) * 64;
        let status_address = header_address + 32;
        let header = [&request.kind.to_le_bytes()[..], &[0; 4], &request.sector.to_le_bytes()].concat();
        self.memory.write_all_at(&header, header_address).unwrap();
        self.memory.write_all_at(&[0xff], status_address).unwrap();
        let (header_piece, status_piece) =
            (DataPiece::readable(header_address, 16), DataPiece::writable(status_address, 1));
        let pieces = [&[header_piece][..], &request.data, &[status_piece]].concat();
        assert!(pieces.len() <= usize::from(DESCRIPTORS_PER_REQUEST));
        for (index, DataPiece { address, len, is_writable }) in (0..).zip(&pieces) {
            let is_last = usize::from(index) + 1 == pieces.len();
            let flags = u16::from(!is_last) | u16::from(*is_writable) << 1;
            let next = if is_last { 0 } else { head + index + 1 };
            let raw =
                [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
            self.memory.write_all_at(&raw, descriptors + u64::from(head + index) * 16).unwrap();
        }
        let entry_address = available + 4 + u64::from(queue.available % QUEUE_ENTRIES) * 2;
        self.memory.write_all_at(&head.to_le_bytes(), entry_address).unwrap();
        queue.available = queue.available.wrapping_add(1);
        self.memory.write_all_at(&queue.available.to_le_bytes(), available + 2).unwrap();
        self.status_addresses.insert((number, head), status_address);
        head
    }

    /// Replaces the index of the available ring with any number.
    pub fn set_available(&mut self, number: u16, index: u16) {
        let RingAddresses { available, .. } = Self::rings(number);
        self.memory.write_all_at(&index.to_le_bytes(), available + 2).unwrap();
    }

    /// Replaces the newest entry of the available ring, which is `head`.
    pub fn replace_head(&mut self, number: u16, head: u16, other: u16) {
        let RingAddresses { available, .. } = Self::rings(number);
        let newest = self.queues[usize::from(number)].available.wrapping_sub(1) % QUEUE_ENTRIES;
        self.memory.write_all_at(&other.to_le_bytes(), available + 4 + u64::from(newest) * 2).unwrap();
        self.status_addresses.remove(&(number, head));
    }

    pub fn kick(&self, queue: u16) {
        self.queues[usize::from(queue)].kick.write(1).unwrap();
    }

    /// Returns the number of requests in progress.
    pub fn requests_in_progress(&self) -> usize {
        self.status_addresses.len()
    }

    /// Returns the requests that have completed since the last call.
    pub fn take_completed(&mut self, number: u16) -> Vec<CompletedRequest> {
        let RingAddresses { used, .. } = Self::rings(number);
        let queue = &mut self.queues[usize::from(number)];
        let mut used_index = [0; 2];
        self.memory.read_exact_at(&mut used_index, used + 2).unwrap();
        let mut completed = Vec::new();
        while queue.used != u16::from_le_bytes(used_index) {
            let mut raw = [0; 8];
            self.memory.read_exact_at(&mut raw, used + 4 + u64::from(queue.used % QUEUE_ENTRIES) * 8).unwrap();
            let head = u32::from_le_bytes(raw[..4].try_into().unwrap()) as u16;
            let written = u32::from_le_bytes(raw[4..].try_into().unwrap());
            let status_address =
                self.status_addresses.remove(&(number, head)).expect("a request that was under way ends once");
            let mut status = [0];
            self.memory.read_exact_at(&mut status, status_address).unwrap();
            completed.push(CompletedRequest { head, written, status: status[0] });
            queue.free_slots.push(head / DESCRIPTORS_PER_REQUEST);
            queue.used = queue.used.wrapping_add(1);
        }
        completed
    }

    /// Waits until requests have completed.
    pub fn wait_completed(&mut self, number: u16) -> Vec<CompletedRequest> {
        wait_for("an answer", || Some(self.take_completed(number)).filter(|completed| !completed.is_empty()))
    }

    /// Does one request and returns its status.
    pub fn request(&mut self, request: &GuestRequest) -> u8 {
        self.add_request(0, request);
        self.kick(0);
        let [completed] = self.wait_completed(0).try_into().unwrap();
        completed.status
    }

    /// Returns whether the server has notified the guest since the last call.
    pub fn is_notified(&self, queue: u16) -> bool {
        self.queues[usize::from(queue)].call.read().is_ok()
    }

    /// Returns whether the server has reported a broken ring since the last call.
    pub fn is_reported_broken(&self, queue: u16) -> bool {
        self.queues[usize::from(queue)].error.read().is_ok()
    }

    pub fn frame(&self, frame: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE as usize];
        self.memory.read_exact_at(&mut bytes, frame * PAGE).unwrap();
        bytes
    }

    pub fn fill(&self, frame: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, frame * PAGE).unwrap();
    }

    /// Reads a block into a frame and returns the content.
    pub fn read(&mut self, block: u64, frame: u64) -> Vec<u8> {
        assert_eq!(self.request(&GuestRequest::read(block, frame)), 0, "block {block}");
        self.frame(frame)
    }

    pub fn write(&mut self, block: u64, frame: u64, bytes: &[u8]) {
        self.fill(frame, bytes);
        assert_eq!(self.request(&GuestRequest::write(block, frame)), 0, "block {block}");
    }
}

pub fn memory() -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(GUEST_FRAMES * PAGE).unwrap();
    file
}
