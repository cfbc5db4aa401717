//! Runs a function with the redo log on the engine's thread, between two of its steps.

use super::command::{Command, Refused};
use super::logged::EngineLog;
use super::{Engine, Handle};
use crate::redo::files::{LocalFile, LogFile};

/// The part of the engine that a visitor can access.
pub struct EngineView<'a, F = LocalFile> {
    pub logged: &'a mut Option<EngineLog<F>>,
    /// The guest's queues run, or requests are in progress.
    pub is_running: bool,
    /// A log that the visitor has removed.
    pub ended: Option<EngineLog<F>>,
}

/// See [the module](self).
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
    /// That of `visit`, or the engine has ended.
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
    pub(super) fn visited(&mut self, Visit(visit): Visit) {
        let has_queues =
            self.active.and_then(|active| self.fronts.get(&active)).is_some_and(|front| !front.lines.is_empty());
        let is_running = has_queues || !self.jobs.is_empty();
        let mut logged = self.logged.take();
        let mut view = EngineView { logged: &mut logged, is_running, ended: None };
        visit(&mut view);
        if let Some(mut ended) = view.ended {
            self.unlogged(&mut ended);
        }
        self.logged = logged;
        // Writes that waited may have space now.
        self.release();
    }
}
