//! Doing something with the log on the engine's thread, between two of its steps.

use super::command::{Command, Refused};
use super::logged::Logged;
use super::{Engine, Handle};
use crate::redo::files::{LocalFile, LogFile};

/// What a visitor finds.
pub struct EngineView<'a, F = LocalFile> {
    /// The log, if the disk has one.
    pub logged: &'a mut Option<Logged<F>>,
    /// The guest may ask for something at any moment, or has done so.
    pub is_running: bool,
    /// A log that was taken away.
    pub ended: Option<Logged<F>>,
}

/// See [the module](self).
pub struct Visit(Box<dyn FnOnce(&mut EngineView<'_>) + Send>);

impl std::fmt::Debug for Visit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Visit")
    }
}

/// An engine that can be visited: the real one, or a model of it.
pub trait VisitEngine: Clone + Send + Sync + 'static {
    /// The files of its log.
    type File: LogFile;

    /// Have `visit` called on the engine's thread, and wait for what it gives.
    ///
    /// # Errors
    /// What it gives; also when the engine has ended.
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
        // There may be room now.
        self.release();
    }
}
