//! `rekindle console`.

use crate::cli::NameOnly;
use anyhow::{Context, Result};
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
use std::time::Duration;

/// Ctrl-], which ends the console.
const LEAVE: u8 = 0x1d;

/// A terminal in raw mode. Restores the previous mode on drop.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

pub fn console(arguments: &NameOnly) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    let connect = || -> Result<UnixStream> {
        let state = State::read(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
        if let Some(attached) = state.attached {
            let (name, starter) = (name.into(), attached.starter);
            return Err(LifeError::Attached { name, starter, action: "its console" }.into());
        }
        let vmm = state.vmm.filter(|vmm| vmm.is_alive()).with_context(|| format!("VM {name} does not run"))?;
        let path = vmm.directory().console();
        UnixStream::connect(&path).with_context(|| format!("console {}", path.display()))
    };
    let mut stream = connect()?;
    let raw = Raw::enter()?;
    if raw.is_some() {
        eprint!("connected to {name}; leave with Ctrl-]\r\n");
    }
    let mut input = true;
    loop {
        match pass(&mut stream, &mut input)? {
            Ended::Left => return Ok(ExitCode::SUCCESS),
            // The guest's QEMU was replaced, or has ended: retry for a while.
            Ended::Closed => {
                let again = (0..100).find_map(|_| {
                    thread::sleep(Duration::from_millis(50));
                    connect().ok()
                });
                match again {
                    Some(again) => stream = again,
                    None => return Ok(ExitCode::SUCCESS),
                }
            }
        }
    }
}

enum Ended {
    Left,
    Closed,
}

fn pass(stream: &mut UnixStream, input: &mut bool) -> Result<Ended> {
    let mut buffer = [0; 4096];
    loop {
        let stdin = io::stdin();
        let mut fds = vec![PollFd::new(&*stream, PollFlags::IN)];
        if *input {
            fds.push(PollFd::new(&stdin, PollFlags::IN));
        }
        poll(&mut fds, None::<&Timespec>)?;
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.first() == Some(&true) {
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => return Ok(Ended::Closed),
                Ok(n) => {
                    let mut out = io::stdout();
                    out.write_all(buffer.get(..n).unwrap_or_default())?;
                    out.flush()?;
                }
            }
        }
        if ready.get(1) == Some(&true) {
            let n = rustix::io::read(&stdin, &mut buffer)?;
            let typed = buffer.get(..n).unwrap_or_default();
            if typed.contains(&LEAVE) {
                return Ok(Ended::Left);
            }
            *input = n > 0;
            if stream.write_all(typed).is_err() {
                return Ok(Ended::Closed);
            }
        }
    }
}
