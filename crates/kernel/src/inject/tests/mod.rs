//! Injection into processes in many states: what the tests share. Each victim is this test binary, run again with
//! [`program::victim`] as its only test.

mod cancelled;
mod program;
mod refused;
mod state;
mod tracer_death;
mod undisturbed;
mod verified;

use super::*;
use program::WAIT;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const VICTIM_KIND: &str = "REKINDLE_TEST_VICTIM";
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A process that does one kind of work, and prints `right` at its end if nothing disturbed it.
struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    process: Process,
    /// What the victim has printed after `started`.
    started_with: String,
}

impl Victim {
    fn start(kind: &str) -> Self {
        Self::start_command(&mut Self::command(kind))
    }

    /// Returns the command that runs the program of this kind.
    fn command(kind: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "inject::tests::program::victim", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(VICTIM_KIND, kind);
        command
    }

    fn start_command(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let process = Process::of(wait_line(&mut output, "pid ").parse().unwrap()).unwrap();
        let started_with = wait_line(&mut output, "started");
        Self { input: child.stdin.take(), child, output, process, started_with }
    }

    fn injector(&self) -> Injector {
        Injector::new(self.process).unwrap()
    }

    /// Writes the byte for which some victims wait.
    fn send_byte(&mut self) {
        self.input.as_mut().unwrap().write_all(b"x").unwrap();
    }

    /// Injects calls until the victim ends, at least one. Returns their number.
    fn disturb_until_the_end(&mut self) -> u32 {
        let injector = self.injector();
        let mut count = 0;
        while process_state(self.process.pid).is_some_and(|state| state != 'Z') {
            match injector.call(getpid()) {
                Ok(pid) => assert_eq!(pid, u64::from(self.process.pid)),
                Err(InjectError::Gone { .. } | InjectError::Stuck { .. }) if !self.process.is_alive() => break,
                Err(e) => panic!("after {count} calls: {e} ({:?})", std::error::Error::source(&e)),
            }
            count += 1;
        }
        count
    }

    /// Injects like [`Victim::disturb_until_the_end`], but pauses between calls for longer than a time-out, since the
    /// time-outs of some calls start again.
    fn disturb_gently(&mut self) -> u32 {
        let injector = self.injector();
        let mut count = 0;
        while self.process.is_alive() {
            match injector.call(getpid()) {
                Ok(pid) => assert_eq!(pid, u64::from(self.process.pid)),
                Err(_) if !self.process.is_alive() => break,
                Err(e) => panic!("after {count} calls: {e} ({:?})", std::error::Error::source(&e)),
            }
            count += 1;
            std::thread::sleep(Duration::from_millis(7) + if count % 3 == 0 { WAIT } else { Duration::ZERO });
        }
        count
    }

    /// Asserts that the victim has ended undisturbed.
    fn assert_undisturbed(mut self) {
        drop(self.input.take());
        wait_line(&mut self.output, "right");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a line that contains `wanted`, and returns the text after it.
fn wait_line(output: &mut impl BufRead, wanted: &str) -> String {
    let mut earlier_lines = String::new();
    loop {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "{wanted:?} never came, but: {earlier_lines}");
        // The test harness may have written to the same line before.
        if let Some((_, rest)) = line.split_once(wanted) {
            return rest.trim_end().into();
        }
        earlier_lines += &line;
    }
}

fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn getpid() -> Call {
    Call::new("getpid", libc::SYS_getpid, [])
}

/// A call that ends the process if it is made.
fn exit_group() -> Call {
    Call::new("exit_group", libc::SYS_exit_group, [7])
}

/// Stops the victim's first thread without suspending its filters.
fn stop_first_thread(victim: &Victim) -> Tracee {
    let mut tracee = Tracee::seize(victim.process.pid as i32, libc::PTRACE_O_TRACESYSGOOD).unwrap();
    assert!(tracee.halt(in_a_minute()).unwrap());
    assert!(tracee.prepare_return(victim.process, victim.injector().gadgets.restorer).unwrap());
    tracee
}

fn in_a_minute() -> Instant {
    Instant::now() + TEST_TIMEOUT
}
