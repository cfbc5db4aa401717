//! Access to the memory of a front end (QEMU), of which a restore has not filled all pages yet.
//!
//! A confined server may not read the memory of other processes. A broker outside of its confinement reads one byte for
//! it, which makes the pager fill the page, and returns only whether it was read.

use rekindle_kernel::confinement::broker::Broker;
use rekindle_kernel::confinement::{CapabilitySet, ConfinementError};
use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use std::io;
use std::sync::Arc;

/// Most front ends whose pages are fetched concurrently.
const CONNECTIONS: usize = 4;

const FIND: u64 = 0;
const CHECK_ALIVE: u64 = 1;
const TOUCH: u64 = 2;

/// Operation, process number, start time, address.
type Request = [u64; 4];

/// How this process finds front ends and reads their memory.
#[derive(Debug, Clone, Default)]
pub struct FrontEndMemory {
    /// `None`: this process is not confined.
    broker: Option<Arc<Broker>>,
}

impl FrontEndMemory {
    /// Starts a broker, for a process that will be confined.
    ///
    /// # Errors
    /// As for [`Broker::start`].
    pub fn through_broker() -> Result<Self, ConfinementError> {
        let broker = Broker::start(CONNECTIONS, CapabilitySet::SYS_PTRACE, answer)?;
        Ok(Self { broker: Some(Arc::new(broker)) })
    }

    fn ask(&self, request: Request) -> io::Result<u64> {
        match &self.broker {
            Some(broker) => broker.ask(request),
            None => answer(request),
        }
    }

    /// Returns the process that has the number `pid` now.
    ///
    /// # Errors
    /// An error if no process has it.
    pub fn find(&self, pid: u32) -> io::Result<Process> {
        Ok(Process { pid, started: self.ask([FIND, pid.into(), 0, 0])? })
    }

    /// Returns whether the process still runs. It counts as ended if the broker has ended.
    #[must_use]
    pub fn is_alive(&self, process: Process) -> bool {
        matches!(self.ask([CHECK_ALIVE, process.pid.into(), process.started, 0]), Ok(1))
    }

    /// Reads a byte of the process's memory, which waits until the page is filled.
    ///
    /// # Errors
    /// Errors of `process_vm_readv(2)`.
    pub fn touch(&self, process: Process, address: u64) -> io::Result<()> {
        self.ask([TOUCH, process.pid.into(), process.started, address]).map(drop)
    }
}

fn answer([operation, pid, started, address]: Request) -> io::Result<u64> {
    let process = Process { pid: u32::try_from(pid).map_err(io::Error::other)?, started };
    match operation {
        FIND => Ok(Process::of(process.pid)?.started),
        CHECK_ALIVE => Ok(process.is_alive().into()),
        TOUCH => memory::read(process, address, &mut [0]).map(|()| 0),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}
