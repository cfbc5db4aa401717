//! Commands that stop themselves at a fault point, so that a test can change something there.

use super::lab::{CommandResult, Lab};
use super::{DEADLINE, wait_for};
use rekindle_kernel::process::Process;
use std::process::Child;

/// A `rekindle` that has stopped itself at a fault point.
pub struct Interrupted {
    child: Child,
    pub process: Process,
    what: String,
}

impl Interrupted {
    /// Starts a command, and waits until it has stopped itself at `point`.
    #[track_caller]
    pub fn start(lab: &Lab, arguments: &[&str], point: &str) -> Self {
        let mut command = lab.command(arguments);
        let mut child = command.env("REKINDLE_FAULT", format!("{point}:stop")).spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        let what = format!("{arguments:?} from {point} on");
        let is_stopped = wait_for(&format!("{what}: to stop itself"), DEADLINE, || {
            let has_ended = child.try_wait().unwrap().is_some();
            (has_ended || process.is_stopped()).then_some(!has_ended)
        });
        if is_stopped {
            return Self { child, process, what };
        }
        panic!("it does not pass the point: {}", lab.wait(child, what))
    }

    /// Resumes the command, and waits until it has ended.
    #[track_caller]
    pub fn finish(self, lab: &Lab) -> CommandResult {
        self.process.resume().unwrap();
        lab.wait(self.child, self.what)
    }
}
