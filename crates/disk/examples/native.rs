//! A vhost-user disk client that is as fast as possible, without guest and emulation. It measures disk servers.
//!
//! ```text
//! native SOCKET --what read|write --order random|in-order --bytes 4096 --depth 32 --span 1073741824 --requests 100000
//!               [--seconds 5] [--fresh | --reuse] [--server PID]
//! ```
//!
//! The front end is rust-vmm's (`vhost`), the driver a split ring with `VIRTIO_RING_F_EVENT_IDX`, as in Linux: device
//! and client are notified only on request. Byte n of the disk is transferred to byte n of the data in the client's
//! memory, as in a guest that caches the whole disk. Memory is touched beforehand, as in a running guest; with
//! `--fresh` it is not, as after a reboot. With `--reuse` each request has a buffer that is used repeatedly, as in
//! fio, and no other memory is touched. Prints one JSON object. With `--server` the object includes the processor
//! time of that process.

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::json;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// `VIRTIO_F_VERSION_1`, `VIRTIO_RING_F_EVENT_IDX`, `VIRTIO_BLK_F_FLUSH`, `VHOST_USER_F_PROTOCOL_FEATURES`.
const FEATURES: u64 = 1 << 32 | EVENT_IDX | 1 << 9 | 1 << 30;
const EVENT_IDX: u64 = 1 << 29;
const QUEUE_ENTRIES: u16 = 256;
const PAGE: u64 = 4096;
/// Addresses in the client's memory: rings, headers and statuses, data.
const DESCRIPTORS: u64 = PAGE;
const AVAILABLE_RING: u64 = 3 * PAGE;
const USED_RING: u64 = 4 * PAGE;
const HEADERS: u64 = 8 * PAGE;
const DATA: u64 = 1 << 20;
/// The memory's address in the front end, used only as a name.
const FRONT_END_ADDRESS: u64 = 0x10_0000_0000;
/// Descriptors of a request: header, data, status.
const DESCRIPTORS_PER_REQUEST: u16 = 3;
/// Requests for which the queue has space.
const MAX_REQUESTS: u16 = QUEUE_ENTRIES / DESCRIPTORS_PER_REQUEST;

/// The command line.
struct Options {
    socket: String,
    is_write: bool,
    is_random: bool,
    /// Bytes of a request.
    bytes: u64,
    /// Most requests in progress.
    depth: u16,
    /// Bytes of the disk that are accessed.
    span: u64,
    requests: u64,
    seconds: f64,
    /// The data's memory is not touched beforehand.
    is_fresh: bool,
    /// Each request has a buffer of its own that is used repeatedly.
    is_reused: bool,
    /// Process ID of the server.
    server: Option<u32>,
}

fn parse_options() -> Result<Options> {
    let mut arguments = std::env::args().skip(1);
    let mut options = Options {
        socket: arguments.next().context("which socket? native SOCKET --what read ...")?,
        is_write: false,
        is_random: false,
        bytes: 4096,
        depth: 32,
        span: 1 << 30,
        requests: u64::MAX,
        seconds: f64::MAX,
        is_fresh: false,
        is_reused: false,
        server: None,
    };
    while let Some(name) = arguments.next() {
        if name == "--fresh" || name == "--reuse" {
            (options.is_fresh, options.is_reused) = (true, name == "--reuse");
            continue;
        }
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match (name.as_str(), value.as_str()) {
            ("--what", "read" | "write") => options.is_write = value == "write",
            ("--order", "random" | "in-order") => options.is_random = value == "random",
            ("--bytes", _) => options.bytes = value.parse()?,
            ("--depth", _) => options.depth = value.parse()?,
            ("--span", _) => options.span = value.parse()?,
            ("--requests", _) => options.requests = value.parse()?,
            ("--seconds", _) => options.seconds = value.parse()?,
            ("--server", _) => options.server = Some(value.parse()?),
            _ => bail!("no option {name} {value}"),
        }
    }
    ensure!(options.depth > 0 && options.depth <= MAX_REQUESTS, "--depth: 1 to {MAX_REQUESTS}");
    let buffers = u64::from(MAX_REQUESTS) * options.bytes;
    ensure!(!options.is_reused || buffers <= options.span, "--reuse: --span must have room for the buffers");
    ensure!(options.bytes > 0 && options.span.is_multiple_of(options.bytes), "--span: a multiple of --bytes");
    Ok(options)
}

/// Returns the processor time of all threads of a process in ns.
fn cpu_time_ns(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        sum += text.split(' ').next().context("an empty schedstat")?.parse::<u64>()?;
    }
    Ok(sum)
}

/// A disk, its queue and the client's memory.
struct Client {
    memory: GuestMemoryMmap,
    front: Frontend,
    kick: EventFd,
    call: EventFd,
    /// Waits for notifications on `call`.
    wait: Epoll,
    /// Index of the next entry of the available ring.
    next_available: u16,
    /// Index of the next entry of the used ring to read.
    next_used: u16,
    free_slots: Vec<u16>,
}

impl Client {
    fn connect(socket: &str, span: u64, is_fresh: bool) -> Result<Self> {
        let bytes = DATA + span;
        let file = File::from(memfd_create("client", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let handle = file.as_raw_fd();
        let region = (GuestAddress(0), usize::try_from(bytes)?, Some(FileOffset::new(file, 0)));
        let memory = GuestMemoryMmap::<()>::from_ranges_with_files([region])?;
        if !is_fresh {
            for page in 0..bytes / PAGE {
                memory.write_obj(1u8, GuestAddress(page * PAGE))?;
            }
        }
        memory.write_slice(&vec![0; (DATA - DESCRIPTORS) as usize], GuestAddress(DESCRIPTORS))?;
        let mut front = Frontend::connect(socket, 1).with_context(|| format!("{socket}: no server there"))?;
        front.set_owner()?;
        let features = front.get_features()?;
        ensure!(features & EVENT_IDX != 0, "the server has no VIRTIO_RING_F_EVENT_IDX");
        front.set_features(features & FEATURES)?;
        let protocol = front.get_protocol_features()?;
        let wanted = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
        front.set_protocol_features(protocol & wanted)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: bytes,
            userspace_addr: FRONT_END_ADDRESS,
            mmap_offset: 0,
            mmap_handle: handle,
        }])?;
        let (kick, call) = (EventFd::new(0)?, EventFd::new(0)?);
        let wait = Epoll::new()?;
        wait.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        front.set_vring_num(0, QUEUE_ENTRIES)?;
        front.set_vring_base(0, 0)?;
        let rings = VringConfigData {
            queue_max_size: QUEUE_ENTRIES,
            queue_size: QUEUE_ENTRIES,
            flags: 0,
            desc_table_addr: FRONT_END_ADDRESS + DESCRIPTORS,
            used_ring_addr: FRONT_END_ADDRESS + USED_RING,
            avail_ring_addr: FRONT_END_ADDRESS + AVAILABLE_RING,
            log_addr: None,
        };
        front.set_vring_addr(0, &rings)?;
        front.set_vring_call(0, &call)?;
        front.set_vring_kick(0, &kick)?;
        front.set_vring_enable(0, true)?;
        let free_slots = (0..MAX_REQUESTS).rev().collect();
        Ok(Self { memory, front, kick, call, wait, next_available: 0, next_used: 0, free_slots })
    }

    /// Adds a request to the ring, invisible to the device.
    fn add_request(&mut self, disk_offset: u64, options: &Options) -> Result<()> {
        let Options { bytes, is_write, is_reused, .. } = *options;
        let slot = self.free_slots.pop().context("the queue is full")?;
        let data = DATA + if is_reused { u64::from(slot) * bytes } else { disk_offset };
        let (head, header) = (slot * DESCRIPTORS_PER_REQUEST, HEADERS + u64::from(slot) * 64);
        let status = header + 32;
        self.memory.write_obj(u32::from(is_write).to_le(), GuestAddress(header))?;
        self.memory.write_obj((disk_offset / 512).to_le(), GuestAddress(header + 8))?;
        self.memory.write_obj(0xffu8, GuestAddress(status))?;
        let data_flags = if is_write { 1 } else { 3 };
        let descriptors = [(header, 16, 1), (data, bytes, data_flags), (status, 1, 2u128)];
        for (number, (address, len, flags)) in (head..).zip(descriptors) {
            let raw = u128::from(address) | u128::from(len) << 64 | flags << 96 | u128::from(number + 1) << 112;
            self.memory.write_obj(raw.to_le(), GuestAddress(DESCRIPTORS + u64::from(number) * 16))?;
        }
        let entry_address = AVAILABLE_RING + 4 + u64::from(self.next_available % QUEUE_ENTRIES) * 2;
        self.memory.write_obj(head.to_le(), GuestAddress(entry_address))?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(())
    }

    /// Makes the requests since `before` visible to the device, and kicks the device if it requires that.
    fn publish_requests(&mut self, before: u16) -> Result<()> {
        if before == self.next_available {
            return Ok(());
        }
        self.memory.store(self.next_available.to_le(), GuestAddress(AVAILABLE_RING + 2), Ordering::Release)?;
        fence(Ordering::SeqCst);
        let kick_event: u16 =
            self.memory.load(GuestAddress(USED_RING + 4 + u64::from(QUEUE_ENTRIES) * 8), Ordering::Acquire)?;
        if self.next_available.wrapping_sub(kick_event).wrapping_sub(1) < self.next_available.wrapping_sub(before) {
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Takes the completed requests, waiting for at least one. Returns their number.
    fn wait_completed(&mut self) -> Result<u64> {
        let mut completed = 0;
        loop {
            let index: u16 = self.memory.load(GuestAddress(USED_RING + 2), Ordering::Acquire)?;
            while self.next_used != index {
                let entry_address = USED_RING + 4 + u64::from(self.next_used % QUEUE_ENTRIES) * 8;
                let head: u32 = self.memory.read_obj(GuestAddress(entry_address))?;
                let slot = u16::try_from(head)? / DESCRIPTORS_PER_REQUEST;
                let status: u8 = self.memory.read_obj(GuestAddress(HEADERS + u64::from(slot) * 64 + 32))?;
                ensure!(status == 0, "a request has ended with status {status}");
                self.free_slots.push(slot);
                self.next_used = self.next_used.wrapping_add(1);
                completed += 1;
            }
            if completed > 0 {
                return Ok(completed);
            }
            // The next completion wakes this thread. It may have happened already.
            let event = GuestAddress(AVAILABLE_RING + 4 + u64::from(QUEUE_ENTRIES) * 2);
            self.memory.store(self.next_used.to_le(), event, Ordering::SeqCst)?;
            fence(Ordering::SeqCst);
            let index: u16 = self.memory.load(GuestAddress(USED_RING + 2), Ordering::Acquire)?;
            if index == self.next_used {
                // A server may have made the shared file non-blocking.
                self.wait.wait(-1, &mut [EpollEvent::default()])?;
                let _ = self.call.read();
            }
        }
    }
}

fn main() -> Result<()> {
    let options = parse_options()?;
    let Options { bytes, span, .. } = options;
    let mut client = Client::connect(&options.socket, span, options.is_fresh)?;
    let positions = span / bytes;
    let mut random = fastrand::Rng::with_seed(1);
    let server_cpu_ns = || options.server.map(cpu_time_ns).transpose();
    let (cpu, begin) = (server_cpu_ns()?, Instant::now());
    let limit = Duration::try_from_secs_f64(options.seconds).unwrap_or(Duration::MAX);
    let (mut started, mut completed, mut is_over) = (0u64, 0u64, false);
    loop {
        let before = client.next_available;
        while !is_over && started < options.requests && started - completed < u64::from(options.depth) {
            let position = if options.is_random { random.u64(..positions) } else { started % positions };
            client.add_request(position * bytes, &options)?;
            started += 1;
        }
        client.publish_requests(before)?;
        if started == completed {
            break;
        }
        completed += client.wait_completed()?;
        is_over = begin.elapsed() >= limit;
    }
    let (took, cpu_after) = (begin.elapsed(), server_cpu_ns()?);
    client.front.get_vring_base(0)?;
    let report = json!({
        "requests": completed,
        "bytes": completed * bytes,
        "ns": took.as_nanos() as u64,
        "server_cpu_ns": cpu_after.zip(cpu).map(|(after, before)| after - before),
    });
    println!("{report}");
    Ok(())
}
