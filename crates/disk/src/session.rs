//! The connection of one front end: the part of the vhost-user protocol that a disk needs.
//!
//! ```text
//! QEMU A ──── its queues run ──────────────┐ stop: GET_VRING_BASE, when no request is in progress
//! QEMU B ──── connects, asks, waits ───────┴─ its queues run ────────────────
//! ```
//!
//! Several front ends may be connected, as during a restart of the VMM. Only one of them has running queues. If
//! another front end starts a queue meanwhile, the command is rejected.

use crate::broker::FrontEndMemory;
use crate::config::{DiskConfig, EVENT_IDX, LOG_ALL, PROTOCOL_FEATURES};
use crate::engine::command::{Command, ConnectionCommand, Notification, QueueDescriptors, Rings};
use crate::engine::refusal::{Answer, Refusal};
use crate::engine::{ConnectionId, Handle, MAX_QUEUE_ENTRIES};
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

/// The state of one front end's connection: features, memory and queues.
#[derive(Debug)]
pub struct FrontEndSession {
    engine: Handle,
    connection_id: ConnectionId,
    config: DiskConfig,
    /// The features that the front end has accepted.
    features: u64,
    regions: Vec<FrontEndRegion>,
    memory: Option<Arc<Memory>>,
    queues: Vec<QueueSetup>,
    fill_state: FillState,
}

/// A region of the guest's memory, as the front end addresses it.
#[derive(Debug, Clone, Copy)]
struct FrontEndRegion {
    /// First address in the front end.
    front_end_address: u64,
    bytes: u64,
    /// First address in the guest.
    guest_address: u64,
}

/// A queue that is being set up.
#[derive(Debug, Default)]
struct QueueSetup {
    rings: Rings,
    kick: Option<OwnedFd>,
    call: Option<File>,
    error: Option<File>,
    is_enabled: bool,
    /// The engine serves the queue.
    is_running: bool,
}

/// The fill state of a guest's memory, and the process that has the memory.
#[derive(Debug)]
pub struct FillState {
    /// A restore is still filling the guest's memory.
    pub is_filling: Arc<AtomicBool>,
    /// The front end's process; `None` if the kernel does not report it, or it has ended.
    pub front_end: Option<Process>,
    pub memory: FrontEndMemory,
}

fn refused(e: Refusal) -> Error {
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

impl FrontEndSession {
    #[must_use]
    pub fn new(engine: Handle, connection_id: ConnectionId, config: DiskConfig, fill_state: FillState) -> Self {
        let queues = (0..config.queues).map(|_| QueueSetup::default()).collect();
        Self { engine, connection_id, config, features: 0, regions: Vec::new(), memory: None, queues, fill_state }
    }

    fn queue(&mut self, index: u32) -> Result<&mut QueueSetup> {
        usize::try_from(index).ok().and_then(|index| self.queues.get_mut(index)).ok_or(Error::InvalidParam)
    }

    /// Maps the guest's memory. While a restore fills it, access to a missing page blocks.
    fn map_memory(&self, regions: Vec<Region>) -> io::Result<Arc<Memory>> {
        if !self.fill_state.is_filling.load(Ordering::Relaxed) {
            return Ok(Arc::new(Memory::map(regions)?));
        }
        let unknown_process = || {
            io::Error::other("its memory is still being filled, and the kernel does not report which process has it")
        };
        let access = self.fill_state.memory.clone();
        let process = self.fill_state.front_end.ok_or_else(unknown_process)?;
        Ok(Arc::new(Memory::map_missing(regions, process, access)?))
    }

    /// Translates an address of the front end to an address of the guest.
    fn guest_address(&self, front_end_address: u64) -> Result<u64> {
        let translated = self.regions.iter().find_map(|region| {
            let offset = front_end_address.checked_sub(region.front_end_address)?;
            if offset < region.bytes { region.guest_address.checked_add(offset) } else { None }
        });
        translated.ok_or(Error::InvalidParam)
    }

    /// Sends a command of this connection to the engine, and waits for the answer.
    fn ask_engine<T>(&self, command: impl FnOnce(Answer<T>) -> ConnectionCommand) -> Result<T> {
        self.engine.ask(|answer| Command::Connection(self.connection_id, command(answer))).map_err(refused)
    }

    /// Starts a queue once it is set up completely.
    fn start_if_ready(&mut self, index: u32) -> Result<()> {
        let has_event_idx = self.features & EVENT_IDX != 0;
        let queue = self.queue(index)?;
        let is_ready = queue.is_enabled && !queue.is_running && queue.rings.size > 0 && queue.rings.descriptors != 0;
        let Some(kick) = queue.kick.as_ref().filter(|_| is_ready) else { return Ok(()) };
        let kick = kick.try_clone().map_err(failed)?;
        let call = queue.call.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let error = queue.error.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        let rings = Rings { has_event_idx, ..queue.rings };
        let descriptors = QueueDescriptors { kick, call, error };
        let queue_index = index as u16;
        self.ask_engine(|answer| ConnectionCommand::StartQueue { queue_index, rings, descriptors, answer })?;
        self.queue(index)?.is_running = true;
        Ok(())
    }

    /// Stops a queue and waits until none of its requests is in progress.
    fn stop(&mut self, index: u32) -> Result<()> {
        if self.queue(index)?.is_running {
            let queue_index = index as u16;
            let position = self.ask_engine(|answer| ConnectionCommand::StopQueue { queue_index, answer })?;
            let queue = self.queue(index)?;
            (queue.is_running, queue.rings.next_available) = (false, position);
        }
        Ok(())
    }

    fn set_notification(&mut self, index: u8, which: Notification, descriptor: Option<File>) -> Result<()> {
        descriptor.as_ref().map_or(Ok(()), prepare_eventfd).map_err(failed)?;
        let queue = self.queue(index.into())?;
        let engine_copy = descriptor.as_ref().map(File::try_clone).transpose().map_err(failed)?;
        match which {
            Notification::Call => queue.call = descriptor,
            Notification::Error => queue.error = descriptor,
        }
        if queue.is_running {
            self.ask_engine(|answer| ConnectionCommand::SetNotification {
                queue_index: index.into(),
                which,
                descriptor: engine_copy,
                answer,
            })?;
        }
        Ok(())
    }

    /// Rejects memory for more requests than there can be, because all of the memory is read.
    fn check_inflight(&self, inflight: &VhostUserInflight) -> Result<()> {
        let is_within_limits = inflight.num_queues <= self.config.queues && inflight.queue_size <= MAX_QUEUE_ENTRIES;
        if is_within_limits { Ok(()) } else { Err(Error::InvalidParam) }
    }
}

impl VhostUserBackendReqHandlerMut for FrontEndSession {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        for index in 0..self.queues.len() as u32 {
            self.stop(index)?;
            *self.queue(index)? = QueueSetup::default();
        }
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.config.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.config.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        if features & LOG_ALL == 0
            && let Some(memory) = &self.memory
        {
            memory.end_dirty_log();
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
        let mapped_region = |(region, file): (&VhostUserMemoryRegion, File)| Region {
            address: region.guest_phys_addr,
            bytes: region.memory_size,
            file,
            offset: region.mmap_offset,
            front_end_address: region.user_addr,
        };
        let memory = self.map_memory(regions.iter().zip(files).map(mapped_region).collect()).map_err(failed)?;
        // QEMU changes the table of a running guest when memory is hot-plugged.
        let running: Vec<u32> =
            (0..).zip(&self.queues).filter(|(_, queue)| queue.is_running).map(|(index, _)| index).collect();
        running.iter().try_for_each(|index| self.stop(*index))?;
        self.ask_engine(|answer| ConnectionCommand::SetMemory(Arc::clone(&memory), answer))?;
        let front_end_region = |region: &VhostUserMemoryRegion| FrontEndRegion {
            front_end_address: region.user_addr,
            bytes: region.memory_size,
            guest_address: region.guest_phys_addr,
        };
        self.regions = regions.iter().map(front_end_region).collect();
        self.memory = Some(memory);
        running.iter().try_for_each(|index| self.start_if_ready(*index))?;
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
        let (descriptors, available, used) =
            (self.guest_address(descriptor)?, self.guest_address(available)?, self.guest_address(used)?);
        let rings = &mut self.queue(index)?.rings;
        (rings.descriptors, rings.available, rings.used) = (descriptors, available, used);
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.queue(index)?.rings.next_available = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop(index)?;
        let queue = self.queue(index)?;
        queue.kick = None;
        Ok(VhostUserVringState::new(index, queue.rings.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        fd.as_ref().map_or(Ok(()), prepare_eventfd).map_err(failed)?;
        self.stop(index.into())?;
        self.queue(index.into())?.kick = fd.map(OwnedFd::from);
        // Without protocol features a queue is enabled from the start.
        if self.features & PROTOCOL_FEATURES == 0 {
            self.queue(index.into())?.is_enabled = true;
        }
        self.start_if_ready(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_notification(index, Notification::Call, fd)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_notification(index, Notification::Error, fd)
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
        Ok(self.config.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.is_enabled = enable;
        if enable { self.start_if_ready(index) } else { self.stop(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let capacity = self.ask_engine(ConnectionCommand::ReadLength)?;
        let space = DiskConfig { capacity, ..self.config }.config_space();
        // A newer front end knows more fields; they read as zeros.
        let offsets = offset..offset.saturating_add(size);
        Ok(offsets.map(|offset| space.get(offset as usize).copied().unwrap_or(0)).collect())
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("nothing of this disk's configuration can be written"))
    }

    fn get_inflight_fd(&mut self, requested: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (requested.num_queues, requested.queue_size);
        self.check_inflight(requested)?;
        // The front end passes the file to this server now, and to the next server after a restart.
        let (_, file, bytes) = Inflight::create(queues, size).map_err(failed)?;
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, passed: &VhostUserInflight, file: File) -> Result<()> {
        self.check_inflight(passed)?;
        let inflight = Inflight::open(file, passed.mmap_offset, passed.mmap_size, passed.num_queues, passed.queue_size);
        let inflight = inflight.map_err(failed)?;
        self.ask_engine(|answer| ConnectionCommand::SetInflight(inflight, answer))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let memory = self.memory.as_ref().ok_or(Error::InvalidOperation("there is no memory to log"))?;
        memory.set_dirty_log(file, log.mmap_offset, log.mmap_size).map_err(failed)
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
    fn only_an_eventfd_is_accepted_and_it_never_blocks() {
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
