//! The reasons why a system call could not be injected.

use super::{CALL_TIMEOUT, STOP_TIMEOUT};
use std::io;

/// The reason why a system call could not be injected.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The process has ended.
    #[error("process {pid} has ended")]
    Gone {
        /// Number of the process.
        pid: u32,
    },
    /// We may not trace the process.
    #[error(
        "process {pid} may not be traced: run as root, or as the user of that process with kernel.yama.ptrace_scope=0"
    )]
    Forbidden {
        /// Number of the process.
        pid: u32,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Another process traces it already.
    #[error(
        "process {pid} is traced by process {tracer} ({name}), and Linux allows one tracer only: end that one first"
    )]
    Traced {
        /// Number of the process.
        pid: u32,
        /// Number of the tracing process.
        tracer: u32,
        /// Command name of the tracing process.
        name: String,
    },
    /// The process is not a 64-bit process of x86-64, or it has no C library or has shadow stacks.
    #[error("process {pid} cannot be made to do system calls: {why}")]
    Unfit {
        /// Number of the process.
        pid: u32,
        /// The property that is missing.
        why: &'static str,
    },
    /// A seccomp filter might kill the process for the call.
    #[error(
        "process {pid} has a seccomp filter that might end it for `{call}`, and the filter cannot be suspended: run as \
         root, not in a unit or container with a filter of its own, on a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    Filtered {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// No thread stopped in time.
    #[error(
        "none of the threads of process {pid} could be stopped within {} ms each: it waits in the kernel (for a disk, or \
         for memory that a pager does not supply), or its stacks are full",
        STOP_TIMEOUT.as_millis()
    )]
    Stuck {
        /// Number of the process.
        pid: u32,
    },
    /// The thread did not reach the call, or did not return from it, in time.
    #[error("`{call}` inside process {pid} was not done within {} s; the process was released as it was", CALL_TIMEOUT.as_secs())]
    Late {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// The thread stopped at another place than the call.
    #[error(
        "process {pid} stopped elsewhere than at `{call}`, which it was to make: another program changes its system calls; it was \
         released as it was"
    )]
    Elsewhere {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
    },
    /// The call itself failed.
    #[error("`{call}` inside process {pid} failed")]
    Failed {
        /// Number of the process.
        pid: u32,
        /// Name of the system call.
        call: &'static str,
        /// The error that the call returned.
        #[source]
        source: io::Error,
    },
    /// ptrace or `/proc` failed unexpectedly.
    #[error("process {pid}: cannot {what}")]
    Trace {
        /// Number of the process.
        pid: u32,
        /// The step that failed.
        what: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

impl InjectError {
    /// Returns the error number of the call itself, if the call was made.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Failed { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

impl From<InjectError> for io::Error {
    fn from(e: InjectError) -> Self {
        let kind = match &e {
            InjectError::Gone { .. } => io::ErrorKind::NotFound,
            InjectError::Forbidden { .. } | InjectError::Traced { .. } => io::ErrorKind::PermissionDenied,
            InjectError::Unfit { .. } | InjectError::Filtered { .. } => io::ErrorKind::Unsupported,
            InjectError::Stuck { .. } | InjectError::Late { .. } => io::ErrorKind::TimedOut,
            InjectError::Elsewhere { .. } => io::ErrorKind::Other,
            InjectError::Failed { source, .. } | InjectError::Trace { source, .. } => source.kind(),
        };
        io::Error::new(kind, e)
    }
}
