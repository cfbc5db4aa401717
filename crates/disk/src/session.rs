//! The connection of one front end: the part of the vhost-user protocol that a disk needs.
//!
//! ```text
//! QEMU A ──── its queues run ──────────────┐ stop: GET_VRING_BASE, when no request is in progress
//! QEMU B ──── connects, asks, waits ───────┴─ its queues run ────────────────
//! ```
//!
//! Several front ends may be connected, as during a restart of the VMM. Only one of them has running queues. If
//! another front end starts a queue meanwhile, the command is rejected.

use crate::config::{DiskConfig, EVENT_IDX, LOG_ALL};
use crate::engine::command::{
    Answer, Command, ConnectionCommand, FrontendId, Notification, QueueDescriptors, Refused, Rings,
};
use crate::engine::{Handle, MAX_QUEUE_ENTRIES};
use crate::inflight::Inflight;
use crate::memory::{Memory, Region};
use rekindle_kernel::process::Process;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

/// A queue that is being set up.
#[derive(Debug, Default)]
struct Queue {
    rings: Rings,
    kick: Option<OwnedFd>,
    call: Option<File>,
    error: Option<File>,
    enabled: bool,
    runs: bool,
}

/// The fill state of a guest's memory, and the process that has the memory.
#[derive(Debug)]
pub struct FillState {
    pub is: Arc<AtomicBool>,
    /// The front end's process.
    pub process: Option<u32>,
}

/// The state of one front end's connection: features, memory and queues.
#[derive(Debug)]
pub struct Frontend {
    engine: Handle,
    session: FrontendId,
    shape: DiskConfig,
    features: u64,
    /// The memory regions: address in the front end, bytes, address in the guest.
    regions: Vec<(u64, u64, u64)>,
    memory: Option<Arc<Memory>>,
    queues: Vec<Queue>,
    filling: FillState,
}

fn refused(e: Refused) -> Error {
    Error::ReqHandlerError(io::Error::other(e))
}

fn failed(e: io::Error) -> Error {
    Error::ReqHandlerError(e)
}

/// Rejects a descriptor that is not an eventfd. Makes an eventfd non-blocking, because the engine waits for nothing
/// but the disk.
fn prepare_eventfd(file: &File) -> io::Result<()> {
    // Without /proc the type cannot be checked; being non-blocking must suffice.
    if let Ok(name) = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        && name.as_os_str() != "anon_inode:[eventfd]"
    {
        let text = format!("a kick, call or error descriptor must be an eventfd, but is {}", name.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::NONBLOCK)?)
}

impl Frontend {
    #[must_use]
    pub fn new(engine: Handle, session: FrontendId, shape: DiskConfig, filling: FillState) -> Self {
        let queues = (0..shape.queues).map(|_| Queue::default()).collect();
        Self { engine, session, shape, features: 0, regions: Vec::new(), memory: None, queues, filling }
    }

    fn queue(&mut self, index: u32) -> Result<&mut Queue> {
        usize::try_from(index).ok().and_then(|index| self.queues.get_mut(index)).ok_or(Error::InvalidParam)
    }

    fn map(&self, regions: Vec<Region>) -> io::Result<Arc<Memory>> {
        if !self.filling.is.load(Ordering::Relaxed) {
            return Ok(Arc::new(Memory::map(regions)?));
        }
        let unknown = || {
            io::Error::other("its memory is still being filled, and the kernel does not report which process has it")
        };
        let process = Process::of(self.filling.process.ok_or_else(unknown)?)?;
        Ok(Arc::new(Memory::map_missing(regions, process)?))
    }

    /// Translates an address of the front end to an address of the guest.
    fn in_guest(&self, address: u64) -> Result<u64> {
        let found = self.regions.iter().find_map(|(theirs, bytes, guest)| {
            let offset = address.checked_sub(*theirs).filter(|offset| offset < bytes)?;
            guest.checked_add(offset)
        });
        found.ok_or(Error::InvalidParam)
    }

    /// Sends a command of this connection to the engine, and waits for the answer.
    fn ask_engine<T>(&self, command: impl FnOnce(Answer<T>) -> ConnectionCommand) -> Result<T> {
        self.engine.ask(|answer| Command::Connection(self.session, command(answer))).map_err(refused)
    }

    /// Starts a queue once it is set up completely.
    fn start(&mut self, index: u32) -> Result<()> {
        let event_idx = self.features & EVENT_IDX != 0;
        let queue = self.queue(index)?;
        let ready = queue.enabled && !queue.runs && queue.rings.size > 0 && queue.rings.descriptors != 0;
        let Some(kick) = queue.kick.as_ref().filter(|_| ready) else { return Ok(()) };
        let kick = kick.try_clone().map_err(failed)?;
        let call = queue.call.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let error = queue.error.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let rings = Rings { event_idx, ..queue.rings };
        let ends = QueueDescriptors { kick, call, error };
        self.ask_engine(|answer| ConnectionCommand::StartQueue(index as u16, rings, ends, answer))?;
        self.queue(index)?.runs = true;
        Ok(())
    }

    /// Rejects memory for more requests than there can be, because all of the memory is read.
    fn check_inflight(&self, about: &VhostUserInflight) -> Result<()> {
        let fits = about.num_queues <= self.shape.queues && about.queue_size <= MAX_QUEUE_ENTRIES;
        if fits { Ok(()) } else { Err(Error::InvalidParam) }
    }

    fn set_notify(&mut self, index: u8, which: Notification, fd: Option<File>) -> Result<()> {
        fd.as_ref().map_or(Ok(()), prepare_eventfd).map_err(failed)?;
        let queue = self.queue(index.into())?;
        let copy = fd.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        match which {
            Notification::Call => queue.call = fd,
            Notification::Error => queue.error = fd,
        }
        if queue.runs {
            self.ask_engine(|answer| ConnectionCommand::Notification(index.into(), which, copy, answer))?;
        }
        Ok(())
    }

    /// Stops a queue and waits until none of its requests is in progress.
    fn stop(&mut self, index: u32) -> Result<()> {
        if self.queue(index)?.runs {
            let next = self.ask_engine(|answer| ConnectionCommand::StopQueue(index as u16, answer))?;
            let queue = self.queue(index)?;
            (queue.runs, queue.rings.next) = (false, next);
        }
        Ok(())
    }
}

impl VhostUserBackendReqHandlerMut for Frontend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        for index in 0..self.queues.len() as u32 {
            self.stop(index)?;
            *self.queue(index)? = Queue::default();
        }
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.shape.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.shape.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        if features & LOG_ALL == 0
            && let Some(memory) = &self.memory
        {
            memory.end_log();
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        if regions.len() != files.len() {
            return Err(Error::IncorrectFds);
        }
        let of = |(region, file): (&VhostUserMemoryRegion, File)| Region {
            address: region.guest_phys_addr,
            bytes: region.memory_size,
            file,
            offset: region.mmap_offset,
            front: region.user_addr,
        };
        let memory = self.map(regions.iter().zip(files).map(of).collect()).map_err(failed)?;
        // QEMU changes the table of a running guest when memory is hot-plugged.
        let running: Vec<u32> =
            (0..).zip(&self.queues).filter(|(_, queue)| queue.runs).map(|(index, _)| index).collect();
        running.iter().try_for_each(|index| self.stop(*index))?;
        self.ask_engine(|answer| ConnectionCommand::Memory(Arc::clone(&memory), answer))?;
        self.regions = regions.iter().map(|of| (of.user_addr, of.memory_size, of.guest_phys_addr)).collect();
        self.memory = Some(memory);
        running.iter().try_for_each(|index| self.start(*index))?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.queue(index)?.rings.size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        // The used ring is written through the mapping, so that its pages are logged, too.
        let found = (self.in_guest(descriptor)?, self.in_guest(available)?, self.in_guest(used)?);
        let rings = &mut self.queue(index)?.rings;
        (rings.descriptors, rings.available, rings.used) = found;
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.queue(index)?.rings.next = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop(index)?;
        let queue = self.queue(index)?;
        queue.kick = None;
        Ok(VhostUserVringState::new(index, queue.rings.next.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        fd.as_ref().map_or(Ok(()), prepare_eventfd).map_err(failed)?;
        self.stop(index.into())?;
        self.queue(index.into())?.kick = fd.map(OwnedFd::from);
        // Without protocol features a queue is enabled from the start.
        if self.features & crate::config::PROTOCOL == 0 {
            self.queue(index.into())?.enabled = true;
        }
        self.start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_notify(index, Notification::Call, fd)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_notify(index, Notification::Error, fd)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.shape.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.enabled = enable;
        if enable { self.start(index) } else { self.stop(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let status = self.engine.ask(Command::Status).map_err(refused)?;
        let space = DiskConfig { capacity: status.bytes, ..self.shape }.space();
        // A newer front end knows more fields; they read as zeros.
        Ok((offset..offset.saturating_add(size)).map(|at| space.get(at as usize).copied().unwrap_or(0)).collect())
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("nothing of this disk's configuration can be written"))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        self.check_inflight(wanted)?;
        let (inflight, file, bytes) = Inflight::create(queues, size).map_err(failed)?;
        // The front end passes the file to this server now, and to the next server after a restart.
        drop(inflight);
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        self.check_inflight(given)?;
        let opened = Inflight::open(file, given.mmap_offset, given.mmap_size, given.num_queues, given.queue_size)
            .map_err(failed)?;
        self.ask_engine(|answer| ConnectionCommand::Inflight(opened, answer))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let memory = self.memory.as_ref().ok_or(Error::InvalidOperation("there is no memory to log"))?;
        memory.log(file, log.mmap_offset, log.mmap_size).map_err(failed)
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no display"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a disk shares no objects"))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(Error::InvalidOperation("memory slots are not negotiated"))
    }

    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        Err(Error::InvalidOperation("memory slots are not negotiated"))
    }

    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(Error::InvalidOperation("memory slots are not negotiated"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("a disk has no state apart from its queues"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no state apart from its queues"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("a disk maps nothing into its guest"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn only_an_eventfd_is_a_notification_and_it_never_blocks() {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        prepare_eventfd(&event).unwrap();
        assert_eq!(rustix::io::read(&event, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(rustix::io::write(&event, &1u64.to_ne_bytes()), Err(rustix::io::Errno::AGAIN));
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(prepare_eventfd(&File::from(OwnedFd::from(reader))).is_err());
        assert!(prepare_eventfd(&File::open("/dev/zero").unwrap()).is_err());
    }
}
