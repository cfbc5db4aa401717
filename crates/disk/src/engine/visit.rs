//! Functions that run with the redo log on the engine's thread, between two of the engine's steps.

use super::redo_log::EngineLog;
use super::refusal::Refusal;
use rekindle_kernel::durable_file::{DurableFile, LocalFile};

/// The part of the engine that a visitor can access.
pub struct EngineView<'a, F = LocalFile> {
    pub log: &'a mut Option<EngineLog<F>>,
    /// The guest's queues run, or requests are in progress.
    pub is_running: bool,
    /// A log that the visitor has removed.
    pub ended: Option<EngineLog<F>>,
}

/// An engine that can be visited: the real one, or a model.
pub trait VisitEngine: Clone + Send + Sync + 'static {
    type File: DurableFile + Clone + 'static;

    /// Runs `visit` on the engine's thread and returns its result.
    ///
    /// # Errors
    /// The error of `visit`; [`Refusal`] also if the engine has ended.
    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut EngineView<'_, Self::File>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal>;
}

/// A function to run with the engine's redo log.
pub struct Visit(Box<dyn FnOnce(&mut EngineView<'_>) + Send>);

impl Visit {
    pub(super) fn new(run: impl FnOnce(&mut EngineView<'_>) + Send + 'static) -> Self {
        Self(Box::new(run))
    }

    pub(super) fn run(self, view: &mut EngineView<'_>) {
        (self.0)(view);
    }
}

impl std::fmt::Debug for Visit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Visit")
    }
}
