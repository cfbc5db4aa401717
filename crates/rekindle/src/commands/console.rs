//! `rekindle console`: connects this terminal to a guest's serial console. Connects again if the guest's QEMU is
//! replaced.

use crate::cli::NameOnly;
use anyhow::{Context, Result};
use rekindle_qemu::socket;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// Ctrl-], which ends the console.
const LEAVE_KEY: u8 = 0x1d;
/// Limit for QEMU to accept the connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to try to connect again.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const RECONNECT_INTERVAL: Duration = Duration::from_millis(50);

pub fn console(arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    let mut console = connect(&rundir)?;
    let terminal = RawTerminal::enter()?;
    if terminal.is_some() {
        eprint!("connected to {name}; leave with Ctrl-]\r\n");
    }
    let mut is_input_open = true;
    loop {
        match copy_until_end(&mut console, &mut is_input_open)? {
            ConsoleEnd::UserLeft => return Ok(ExitCode::SUCCESS),
            // The guest's QEMU was replaced, or has ended.
            ConsoleEnd::Closed => match reconnect(&rundir) {
                Some(new_console) => console = new_console,
                None => return Ok(ExitCode::SUCCESS),
            },
        }
    }
}

fn connect(rundir: &RunDir) -> Result<UnixStream> {
    let name = rundir.name();
    let state = State::read(rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
    if let Some(attached) = state.attached {
        let (name, starter) = (name.into(), attached.starter);
        return Err(LifeError::Attached { name, starter, action: "its console" }.into());
    }
    let vmm = state.vmm.filter(|vmm| vmm.is_alive()).with_context(|| format!("VM {name} does not run"))?;
    let path = vmm.directory().console();
    socket::connect(&path, CONNECT_TIMEOUT).with_context(|| format!("console {}", path.display()))
}

fn reconnect(rundir: &RunDir) -> Option<UnixStream> {
    let deadline = Instant::now() + RECONNECT_TIMEOUT;
    while Instant::now() < deadline {
        thread::sleep(RECONNECT_INTERVAL);
        if let Ok(console) = connect(rundir) {
            return Some(console);
        }
    }
    None
}

enum ConsoleEnd {
    UserLeft,
    Closed,
}

/// Copies input to the console and its output to standard output. `is_input_open`: cleared at the end of the input.
fn copy_until_end(console: &mut UnixStream, is_input_open: &mut bool) -> Result<ConsoleEnd> {
    let mut buffer = [0; 4096];
    loop {
        let stdin = io::stdin();
        let mut fds = vec![PollFd::new(&*console, PollFlags::IN)];
        if *is_input_open {
            fds.push(PollFd::new(&stdin, PollFlags::IN));
        }
        poll(&mut fds, None::<&Timespec>)?;
        let is_ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if is_ready.first() == Some(&true) {
            match console.read(&mut buffer) {
                Ok(0) | Err(_) => return Ok(ConsoleEnd::Closed),
                Ok(length) => {
                    let mut stdout = io::stdout();
                    stdout.write_all(buffer.get(..length).unwrap_or_default())?;
                    stdout.flush()?;
                }
            }
        }
        if is_ready.get(1) == Some(&true) {
            let length = rustix::io::read(&stdin, &mut buffer)?;
            let typed = buffer.get(..length).unwrap_or_default();
            if typed.contains(&LEAVE_KEY) {
                return Ok(ConsoleEnd::UserLeft);
            }
            *is_input_open = length > 0;
            if console.write_all(typed).is_err() {
                return Ok(ConsoleEnd::Closed);
            }
        }
    }
}

/// A terminal in raw mode. Restores the previous mode on drop.
struct RawTerminal {
    previous_mode: Termios,
}

impl RawTerminal {
    /// `None` if standard input is not a terminal.
    fn enter() -> Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let previous_mode = tcgetattr(io::stdin())?;
        let mut raw_mode = previous_mode.clone();
        raw_mode.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw_mode)?;
        Ok(Some(Self { previous_mode }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.previous_mode);
    }
}
