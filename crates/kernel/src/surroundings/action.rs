//! What a child does between fork and exec to enter the surroundings of another process: a list of actions, each with
//! a name for errors. They are prepared before the fork, because after it the child may only make async-signal-safe
//! calls: no allocation, no lock.

use std::io;
use std::path::PathBuf;

/// One step of the child.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Step {
    /// `fork` itself, or what it needs.
    #[error("creating the process")]
    Fork,
    /// Descriptors of the caller are closed at exec.
    #[error("closing inherited descriptors")]
    CloseDescriptors,
    /// The lock file, by which the process can be found.
    #[error("locking {}", .0.display())]
    Lock(PathBuf),
    /// Label for the exec.
    #[error("setting the security label {0:?}")]
    Label(String),
    /// The directory of the cgroup.
    #[error("joining cgroup {}", .0.display())]
    Cgroup(PathBuf),
    /// A resource limit, as `/proc/PID/limits` names it.
    #[error("setting the limit {0:?}")]
    Limit(&'static str),
    /// The processors on which it may run.
    #[error("setting the CPU affinity")]
    Affinity,
    /// Scheduling policy and priority.
    #[error("setting the scheduling policy")]
    Scheduling,
    /// Nice value.
    #[error("setting the nice value")]
    Nice,
    /// `oom_score_adj`.
    #[error("setting oom_score_adj")]
    OomScore,
    /// I/O scheduling class and priority.
    #[error("setting the I/O priority")]
    IoPriority,
    /// A namespace.
    #[error("joining the {0} namespace")]
    Namespace(&'static str),
    /// Root directory.
    #[error("entering the root directory")]
    Root,
    /// Working directory.
    #[error("entering the working directory")]
    WorkingDirectory,
    /// File mode creation mask.
    #[error("setting the umask")]
    Umask,
    /// A descriptor that the program inherits.
    #[error("giving it descriptor {0}")]
    Descriptor(i32),
    /// Supplementary groups.
    #[error("setting the supplementary groups")]
    Groups,
    /// Group id.
    #[error("setting the group id")]
    GroupId,
    /// The bounding set of capabilities.
    #[error("limiting the capability bounding set")]
    BoundingSet,
    /// User id.
    #[error("setting the user id")]
    UserId,
    /// The other sets of capabilities.
    #[error("setting the capabilities")]
    Capabilities,
    /// `no_new_privs`.
    #[error("setting no_new_privs")]
    NoNewPrivs,
    /// The program.
    #[error("executing the program")]
    Execute,
}

/// One prepared action.
pub(super) struct Action {
    pub step: Step,
    /// Makes async-signal-safe calls only.
    pub run: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
}

impl Action {
    pub fn new(step: Step, run: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { step, run: Box::new(run) }
    }
}
