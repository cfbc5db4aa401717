//! Functions that run with the redo log on the engine's thread, between two of the engine's steps.

use super::command::{Command, Refused};
use super::redo_log::EngineLog;
use super::{Engine, Handle};
use crate::redo::files::{LocalFile, LogFile};

/// The part of the engine that a visitor can access.
pub struct EngineView<'a, F = LocalFile> {
    pub log: &'a mut Option<EngineLog<F>>,
    /// The guest's queues run, or requests are in progress.
    pub is_running: bool,
    /// A log that the visitor has removed.
    pub ended: Option<EngineLog<F>>,
}

/// A function to run with the engine's redo log.
pub struct Visit(Box<dyn FnOnce(&mut EngineView<'_>) + Send>);

impl std::fmt::Debug for Visit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Visit")
    }
}

/// An engine that can be visited: the real one, or a model.
pub trait VisitEngine: Clone + Send + Sync + 'static {
    type File: LogFile;

    /// Runs `visit` on the engine's thread and returns its result.
    ///
    /// # Errors
    /// The error of `visit`; [`Refused`] also if the engine has ended.
    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut EngineView<'_, Self::File>) -> Result<T, Refused> + Send + 'static,
    ) -> Result<T, Refused>;
}

impl VisitEngine for Handle {
    type File = LocalFile;

    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut EngineView<'_>) -> Result<T, Refused> + Send + 'static,
    ) -> Result<T, Refused> {
        self.ask(|answer| Command::Visit(Visit(Box::new(move |view| drop(answer.send(visit(view)))))))
    }
}

impl Engine {
    pub(super) fn run_visit(&mut self, Visit(visit): Visit) {
        let is_running = self.front_end.is_running();
        let mut log = self.front_end.blocks.log.take();
        let mut view = EngineView { log: &mut log, is_running, ended: None };
        visit(&mut view);
        // Writes that waited for the log continue into the image.
        if let Some(mut ended) = view.ended {
            self.front_end.requeue_parts(ended.take_waiting());
        }
        self.front_end.blocks.log = log;
        // Writes that waited may have space now.
        self.front_end.retry_waiting_parts();
    }
}
