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
const ENTRIES: u16 = 256;
const PAGE: u64 = 4096;
/// Addresses in the client's memory: rings, headers and statuses, data.
const DESCRIPTORS: u64 = PAGE;
const AVAILABLE: u64 = 3 * PAGE;
const USED: u64 = 4 * PAGE;
const HEADERS: u64 = 8 * PAGE;
const DATA: u64 = 1 << 20;
/// The memory's address in the front end, used only as a name.
const FRONT: u64 = 0x10_0000_0000;
/// Descriptors of a request: header, data, status.
const EACH: u16 = 3;

struct Options {
    socket: String,
    is_write: bool,
    is_random: bool,
    bytes: u64,
    depth: u16,
    span: u64,
    requests: u64,
    seconds: f64,
    is_fresh: bool,
    is_reused: bool,
    server: Option<u32>,
}

fn options() -> Result<Options> {
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
    ensure!(options.depth > 0 && options.depth <= ENTRIES / EACH, "--depth: 1 to {}", ENTRIES / EACH);
    let buffers = u64::from(ENTRIES / EACH) * options.bytes;
    ensure!(!options.is_reused || buffers <= options.span, "--reuse: --span must have room for the buffers");
    ensure!(options.bytes > 0 && options.span.is_multiple_of(options.bytes), "--span: a multiple of --bytes");
    Ok(options)
}

/// Returns the processor time of all threads of a process in ns.
fn used_ns(pid: u32) -> Result<u64> {
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
    available: u16,
    used: u16,
    free: Vec<u16>,
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
            userspace_addr: FRONT,
            mmap_offset: 0,
            mmap_handle: handle,
        }])?;
        let (kick, call) = (EventFd::new(0)?, EventFd::new(0)?);
        let wait = Epoll::new()?;
        wait.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        front.set_vring_num(0, ENTRIES)?;
        front.set_vring_base(0, 0)?;
        let rings = VringConfigData {
            queue_max_size: ENTRIES,
            queue_size: ENTRIES,
            flags: 0,
            desc_table_addr: FRONT + DESCRIPTORS,
            used_ring_addr: FRONT + USED,
            avail_ring_addr: FRONT + AVAILABLE,
            log_addr: None,
        };
        front.set_vring_addr(0, &rings)?;
        front.set_vring_call(0, &call)?;
        front.set_vring_kick(0, &kick)?;
        front.set_vring_enable(0, true)?;
        let free = (0..ENTRIES / EACH).rev().collect();
        Ok(Self { memory, front, kick, call, wait, available: 0, used: 0, free })
    }

    /// Adds a request to the ring, invisible to the device.
    fn put(&mut self, at: u64, bytes: u64, is_write: bool, is_reused: bool) -> Result<()> {
        let slot = self.free.pop().context("the queue is full")?;
        let data = DATA + if is_reused { u64::from(slot) * bytes } else { at };
        let (head, header) = (slot * EACH, HEADERS + u64::from(slot) * 64);
        let status = header + 32;
        self.memory.write_obj(u32::from(is_write).to_le(), GuestAddress(header))?;
        self.memory.write_obj((at / 512).to_le(), GuestAddress(header + 8))?;
        self.memory.write_obj(0xffu8, GuestAddress(status))?;
        let data_flags = if is_write { 1 } else { 3 };
        let parts = [(header, 16, 1), (data, bytes, data_flags), (status, 1, 2u128)];
        for (n, (address, len, flags)) in (head..).zip(parts) {
            let raw = u128::from(address) | u128::from(len) << 64 | flags << 96 | u128::from(n + 1) << 112;
            self.memory.write_obj(raw.to_le(), GuestAddress(DESCRIPTORS + u64::from(n) * 16))?;
        }
        let place = AVAILABLE + 4 + u64::from(self.available % ENTRIES) * 2;
        self.memory.write_obj(head.to_le(), GuestAddress(place))?;
        self.available = self.available.wrapping_add(1);
        Ok(())
    }

    /// Makes the requests since `before` visible to the device, and kicks the device if it requires that.
    fn show(&mut self, before: u16) -> Result<()> {
        if before == self.available {
            return Ok(());
        }
        self.memory.store(self.available.to_le(), GuestAddress(AVAILABLE + 2), Ordering::Release)?;
        fence(Ordering::SeqCst);
        let wanted: u16 = self.memory.load(GuestAddress(USED + 4 + u64::from(ENTRIES) * 8), Ordering::Acquire)?;
        if self.available.wrapping_sub(wanted).wrapping_sub(1) < self.available.wrapping_sub(before) {
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Takes the completed requests, waiting for at least one. Returns their number.
    fn take(&mut self) -> Result<u64> {
        let mut ended = 0;
        loop {
            let index: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire)?;
            while self.used != index {
                let place = USED + 4 + u64::from(self.used % ENTRIES) * 8;
                let head: u32 = self.memory.read_obj(GuestAddress(place))?;
                let slot = u16::try_from(head)? / EACH;
                let status: u8 = self.memory.read_obj(GuestAddress(HEADERS + u64::from(slot) * 64 + 32))?;
                ensure!(status == 0, "a request has ended with status {status}");
                self.free.push(slot);
                self.used = self.used.wrapping_add(1);
                ended += 1;
            }
            if ended > 0 {
                return Ok(ended);
            }
            // The next completion wakes this thread. It may have happened already.
            let event = GuestAddress(AVAILABLE + 4 + u64::from(ENTRIES) * 2);
            self.memory.store(self.used.to_le(), event, Ordering::SeqCst)?;
            fence(Ordering::SeqCst);
            let index: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire)?;
            if index == self.used {
                // A server may have made the shared file non-blocking.
                self.wait.wait(-1, &mut [EpollEvent::default()])?;
                let _ = self.call.read();
            }
        }
    }
}

fn main() -> Result<()> {
    let options = options()?;
    let Options { bytes, span, .. } = options;
    let mut client = Client::connect(&options.socket, span, options.is_fresh)?;
    let places = span / bytes;
    let mut random = fastrand::Rng::with_seed(1);
    let used = || options.server.map(used_ns).transpose();
    let (cpu, begin) = (used()?, Instant::now());
    let limit = Duration::try_from_secs_f64(options.seconds).unwrap_or(Duration::MAX);
    let (mut started, mut ended, mut is_over) = (0u64, 0u64, false);
    loop {
        let before = client.available;
        while !is_over && started < options.requests && started - ended < u64::from(options.depth) {
            let place = if options.is_random { random.u64(..places) } else { started % places };
            client.put(place * bytes, bytes, options.is_write, options.is_reused)?;
            started += 1;
        }
        client.show(before)?;
        if started == ended {
            break;
        }
        ended += client.take()?;
        is_over = begin.elapsed() >= limit;
    }
    let (took, cpu_after) = (begin.elapsed(), used()?);
    client.front.get_vring_base(0)?;
    let report = json!({
        "requests": ended,
        "bytes": ended * bytes,
        "ns": took.as_nanos() as u64,
        "server_cpu_ns": cpu_after.zip(cpu).map(|(after, before)| after - before),
    });
    println!("{report}");
    Ok(())
}
