//! A connected QEMU: its memory and its queues.

use super::FrontEnd;
use super::queue::RunningQueue;
use crate::channel;
use crate::engine::catalog::BlockCatalog;
use crate::engine::command::{ConnectionCommand, FrontendId, Notification, Refused};
use crate::engine::io::Token;
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
    /// The disk may have grown while the QEMU's queues did not run, when QEMU does not listen.
    pub is_growth_unreported: bool,
}

impl Connection {
    /// Returns whether the QEMU has passed no memory and started no queue, as while it waits for its guest's state.
    pub fn is_waiting(&self) -> bool {
        self.memory.is_none() && self.queues.is_empty()
    }

    pub fn has_queues(&self) -> bool {
        !self.queues.is_empty()
    }

    pub fn notify_grown(&mut self) {
        self.is_growth_unreported = self.queues.is_empty();
        if let Some(Err(e)) = self.channel.as_ref().map(channel::config_changed) {
            warn_limited!("cannot notify QEMU that the disk has grown: {e}; the guest sees it after a reboot");
        }
    }
}

impl<B: BlockCatalog> FrontEnd<B> {
    /// Carries out a command of a QEMU's session.
    pub fn carry_out(&mut self, session: FrontendId, command: ConnectionCommand) {
        match command {
            ConnectionCommand::Join { process } => self.join(session, process),
            ConnectionCommand::Leave => self.leave(session),
            ConnectionCommand::Channel(channel, answer) => {
                self.set_channel(session, channel);
                let _ = answer.send(Ok(()));
            }
            ConnectionCommand::Memory(memory, answer) => drop(answer.send(self.set_memory(session, memory))),
            ConnectionCommand::Inflight(inflight, answer) => drop(answer.send(self.set_inflight(session, inflight))),
            ConnectionCommand::StartQueue(queue, rings, descriptors, answer) => {
                drop(answer.send(self.start_queue(session, queue, &rings, descriptors)));
            }
            ConnectionCommand::Notification(queue, which, descriptor, answer) => {
                drop(answer.send(self.set_notification(session, queue, which, descriptor)));
            }
            ConnectionCommand::StopQueue(queue, answer) => self.stop_queue(session, queue, answer),
        }
    }

    /// Adds a QEMU that has connected.
    fn join(&mut self, session: FrontendId, process: Option<u32>) {
        self.connections.insert(session, Connection { process, is_growth_unreported: true, ..Connection::default() });
    }

    /// Removes a QEMU. Its requests in progress still complete, without notification. This includes requests that
    /// wait because the log is full.
    fn leave(&mut self, session: FrontendId) {
        let connection = self.connections.remove(&session);
        for number in connection.iter().flat_map(|connection| connection.queues.keys()) {
            self.io.stop_listening(Token::Kick(session, *number));
        }
        self.stopping.retain(|stopping| stopping.session != session);
        if self.active == Some(session) {
            self.active = None;
        }
        self.written_pages.take_if(|pages| pages.session == session);
        self.retry_waiting_parts();
    }

    fn set_channel(&mut self, session: FrontendId, channel: OwnedFd) {
        if let Some(connection) = self.connections.get_mut(&session) {
            connection.channel = Some(channel);
        }
    }

    /// Notifies all QEMUs that the disk has grown.
    pub fn notify_grown(&mut self) {
        self.connections.values_mut().for_each(Connection::notify_grown);
    }

    pub(super) fn connection(&mut self, session: FrontendId) -> Result<&mut Connection, Refused> {
        self.connections.get_mut(&session).ok_or_else(|| Refused("there is no such front end".into()))
    }

    /// Replaces a QEMU's memory. *Needs:* none of its queues runs.
    fn set_memory(&mut self, session: FrontendId, memory: Arc<Memory>) -> Result<(), Refused> {
        let connection = self.connection(session)?;
        if connection.has_queues() {
            return Err(Refused("its queues run, so its memory cannot be replaced".into()));
        }
        let previous = connection.memory.replace(Arc::clone(&memory));
        if let Some(pages) = self.written_pages.as_mut().filter(|pages| pages.session == session) {
            pages.remap(previous, &memory);
        }
        self.blocks.note_mapped(&memory);
        Ok(())
    }

    fn set_inflight(&mut self, session: FrontendId, inflight: Inflight) -> Result<(), Refused> {
        self.connection(session)?.inflight = Some(inflight);
        Ok(())
    }

    fn set_notification(
        &mut self,
        session: FrontendId,
        queue: u16,
        which: Notification,
        descriptor: Option<File>,
    ) -> Result<(), Refused> {
        if let Some(queue) = self.connection(session)?.queues.get_mut(&queue) {
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
