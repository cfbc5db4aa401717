//! The handle through which other threads send commands to the engine.

use super::command::Command;
use super::refusal::{Answer, Refusal};
use super::visit::{EngineView, Visit, VisitEngine};
use rekindle_kernel::durable_file::LocalFile;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// A handle through which threads send commands to the engine.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: Sender<Command>,
    /// Written after each command: the engine waits for it.
    wake: Arc<OwnedFd>,
}

impl Handle {
    pub(super) fn new(commands: Sender<Command>, wake: Arc<OwnedFd>) -> Self {
        Self { commands, wake }
    }

    /// Sends a command and waits for the answer.
    ///
    /// # Errors
    /// [`Refusal`], also if the engine has ended.
    pub fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, Refusal> {
        let has_ended = || Refusal("the disk's engine has ended".into());
        let (sender, answer) = channel();
        self.commands.send(command(sender)).map_err(|_| has_ended())?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map_err(|_| has_ended())?;
        answer.recv().map_err(|_| has_ended())?
    }

    /// Sends a command that has no answer.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl VisitEngine for Handle {
    type File = LocalFile;

    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut EngineView<'_>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.ask(|answer| Command::Visit(Visit::new(move |view| drop(answer.send(visit(view))))))
    }
}
