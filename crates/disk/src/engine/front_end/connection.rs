//! A connected QEMU: its memory and its queues, and the commands that change them.

use super::FrontEnd;
use super::queue::RunningQueue;
use crate::channel;
use crate::engine::catalog::BlockCatalog;
use crate::engine::command::{ConnectionCommand, Notification};
use crate::engine::ids::ConnectionId;
use crate::engine::io::Token;
use crate::engine::refusal::Refusal;
use crate::inflight::Inflight;
use crate::memory::Memory;
use crate::report::warn_limited;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A connected QEMU: its process, its memory and its queues.
#[derive(Default)]
pub(super) struct Connection {
    pub process: Option<u32>,
    pub memory: Option<Arc<Memory>>,
    pub queues: BTreeMap<u16, RunningQueue>,
    pub inflight: Option<Inflight>,
    /// The socket for notifications to the QEMU.
    channel: Option<OwnedFd>,
    growth: GrowthReport,
}

/// How much of the disk's growth a QEMU knows.
///
/// QEMU discards a notification while it is stopping its guest, and while the guest is stopped. What it has discarded is
/// sent again when the guest continues.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum GrowthReport {
    /// The disk may have grown, and QEMU has not been notified while its queues ran.
    #[default]
    Due,
    /// QEMU has been notified, and has not read the disk's length since.
    Sent,
    Read,
}

impl Connection {
    /// Returns whether the QEMU has passed no memory and started no queue, as while it waits for its guest's state.
    pub fn is_waiting(&self) -> bool {
        self.memory.is_none() && self.queues.is_empty()
    }

    pub fn has_queues(&self) -> bool {
        !self.queues.is_empty()
    }

    /// Notifies the QEMU that the disk may have grown.
    pub fn notify_grown(&mut self) {
        self.growth = if self.queues.is_empty() { GrowthReport::Due } else { GrowthReport::Sent };
        if let Some(Err(e)) = self.channel.as_ref().map(channel::notify_config_changed) {
            warn_limited!("cannot notify QEMU that the disk has grown: {e}; the guest sees it after a reboot");
        }
    }

    /// Notifies the QEMU that the disk may have grown, if it may not know.
    pub fn repeat_growth(&mut self) {
        if self.growth != GrowthReport::Read {
            self.notify_grown();
        }
    }

    /// The QEMU has read the disk's length.
    fn note_length_read(&mut self) {
        // Before its queues run, QEMU reads the length and does not pass it to a guest that already uses the disk.
        if self.growth == GrowthReport::Sent {
            self.growth = GrowthReport::Read;
        }
    }
}

impl<B: BlockCatalog> FrontEnd<B> {
    /// Carries out a command of a connected QEMU.
    pub fn carry_out(&mut self, connection_id: ConnectionId, command: ConnectionCommand) {
        match command {
            ConnectionCommand::Join { process } => self.join(connection_id, process),
            ConnectionCommand::Leave => self.leave(connection_id),
            ConnectionCommand::SetChannel(channel, answer) => {
                self.set_channel(connection_id, channel);
                let _ = answer.send(Ok(()));
            }
            ConnectionCommand::ReadLength(answer) => drop(answer.send(Ok(self.read_length(connection_id)))),
            ConnectionCommand::SetMemory(memory, answer) => drop(answer.send(self.set_memory(connection_id, memory))),
            ConnectionCommand::SetInflight(inflight, answer) => {
                drop(answer.send(self.set_inflight(connection_id, inflight)));
            }
            ConnectionCommand::StartQueue { queue_index, rings, descriptors, answer } => {
                drop(answer.send(self.start_queue(connection_id, queue_index, &rings, descriptors)));
            }
            ConnectionCommand::SetNotification { queue_index, which, descriptor, answer } => {
                drop(answer.send(self.set_notification(connection_id, queue_index, which, descriptor)));
            }
            ConnectionCommand::StopQueue { queue_index, answer } => {
                self.stop_queue(connection_id, queue_index, answer);
            }
        }
    }

    /// Adds a QEMU that has connected.
    fn join(&mut self, connection_id: ConnectionId, process: Option<u32>) {
        self.connections.insert(connection_id, Connection { process, ..Connection::default() });
    }

    /// Removes a QEMU. Its requests in progress still complete, without notification. This includes requests that
    /// wait because the log is full.
    fn leave(&mut self, connection_id: ConnectionId) {
        let connection = self.connections.remove(&connection_id);
        for queue_index in connection.iter().flat_map(|connection| connection.queues.keys()) {
            self.io.stop_listening(Token::Kick(connection_id, *queue_index));
        }
        self.stopping_queues.retain(|stopping| stopping.connection_id != connection_id);
        if self.active == Some(connection_id) {
            self.active = None;
        }
        self.written_pages.take_if(|pages| pages.connection_id == connection_id);
        self.retry_waiting_parts();
    }

    fn set_channel(&mut self, connection_id: ConnectionId, channel: OwnedFd) {
        if let Some(connection) = self.connections.get_mut(&connection_id) {
            connection.channel = Some(channel);
        }
    }

    /// Returns the disk's length in bytes for the QEMU.
    fn read_length(&mut self, connection_id: ConnectionId) -> u64 {
        if let Some(connection) = self.connections.get_mut(&connection_id) {
            connection.note_length_read();
        }
        self.blocks.disk_properties().capacity
    }

    /// Notifies all QEMUs that the disk has grown.
    pub fn notify_grown(&mut self) {
        self.connections.values_mut().for_each(Connection::notify_grown);
    }

    pub(super) fn connection(&mut self, connection_id: ConnectionId) -> Result<&mut Connection, Refusal> {
        self.connections.get_mut(&connection_id).ok_or_else(|| Refusal("there is no such front end".into()))
    }

    /// Replaces a QEMU's memory. *Needs:* none of its queues runs.
    fn set_memory(&mut self, connection_id: ConnectionId, memory: Arc<Memory>) -> Result<(), Refusal> {
        let connection = self.connection(connection_id)?;
        if connection.has_queues() {
            return Err(Refusal("its queues run, so its memory cannot be replaced".into()));
        }
        let previous = connection.memory.replace(Arc::clone(&memory));
        if let Some(pages) = self.written_pages.as_mut().filter(|pages| pages.connection_id == connection_id) {
            pages.remap(previous, &memory);
        }
        self.blocks.note_mapped(&memory);
        Ok(())
    }

    fn set_inflight(&mut self, connection_id: ConnectionId, inflight: Inflight) -> Result<(), Refusal> {
        self.connection(connection_id)?.inflight = Some(inflight);
        Ok(())
    }

    fn set_notification(
        &mut self,
        connection_id: ConnectionId,
        queue_index: u16,
        which: Notification,
        descriptor: Option<File>,
    ) -> Result<(), Refusal> {
        if let Some(queue) = self.connection(connection_id)?.queues.get_mut(&queue_index) {
            match which {
                Notification::Call => {
                    queue.call = descriptor;
                    // The guest could not be notified of earlier answers.
                    queue.interrupt();
                }
                Notification::Error => queue.error = descriptor,
            }
        }
        Ok(())
    }
}
