//! QMP through libvirt.
//!
//! libvirt holds the monitor of its QEMUs, and a monitor serves one client. `virsh qemu-monitor-command` passes
//! commands on. One `virsh` is kept open and gets its commands through standard input, because starting a `virsh`
//! takes tens of milliseconds. A thread at the other end of a socket pair presents it as a monitor, so that [`Qmp`]
//! can use it. A command that hands over a descriptor needs another `virsh`, which inherits the descriptor
//! (`--pass-fds`, libvirt 8.2).
//!
//! Events do not arrive this way. Only two are needed, and the thread creates them: `STOP` with the time at which
//! `stop` was sent, and `RESUME` with the time at which `cont` was answered. Therefore a measured pause is never
//! shorter than the actual one.

use crate::qmp::{Qmp, QmpError};
use command_fds::{CommandFdExt, FdMapping};
use rekindle_kernel::output::{waiting_in, within};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Name of the program, looked up in `PATH`.
const VIRSH: &str = "virsh";
/// Limit for a command. libvirt itself waits up to 30 s for another command to end.
const PATIENCE: Duration = Duration::from_secs(40);
/// Limit of the output for a command, in bytes.
const LONGEST: usize = 16 << 20;
/// Limit of the kept error output, in bytes.
const COMPLAINT: usize = 1 << 16;
/// Number of the descriptor that a `virsh` inherits.
const FD: i32 = 9;

/// Connects to the QEMU of a libvirt domain.
///
/// # Errors
/// [`QmpError::Libvirt`] with virsh's message.
pub fn connect(domain: &str, uri: Option<&str>, timeout: Duration) -> Result<Qmp, QmpError> {
    let failed = |message: String| QmpError::Libvirt { domain: domain.into(), message };
    let mut virsh = Virsh::start(domain, uri).map_err(|e| failed(e.0))?;
    let asked = virsh.execute(r#"{"execute":"query-version"}"#).map_err(|e| failed(e.0))?;
    let version: Value = serde_json::from_str(&asked).map_err(|_| failed(asked.clone()))?;
    let version = version.get("return").cloned().ok_or_else(|| failed(asked))?;
    let (ours, theirs) = UnixStream::pair().map_err(|e| failed(e.to_string()))?;
    let named = thread::Builder::new().name("virsh".into());
    named.spawn(move || virsh.serve(&theirs, &version)).map_err(|e| failed(e.to_string()))?;
    Qmp::over(ours, timeout)
}

/// virsh's error message instead of a reply.
struct VirshError(String);

impl From<io::Error> for VirshError {
    fn from(e: io::Error) -> Self {
        Self(format!("{VIRSH}: {e}; install libvirt-clients"))
    }
}

/// A `virsh` process that reads commands from its standard input.
struct Virsh {
    domain: String,
    uri: Option<String>,
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    /// Output that was not processed yet, from the beginning of a line.
    unread: Vec<u8>,
    /// Number of commands so far.
    count: u64,
    /// Whether the next output may belong to a command that timed out.
    spoilt: bool,
}

impl Drop for Virsh {
    fn drop(&mut self) {
        // A killed `virsh` does not write a history file.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn virsh(uri: Option<&str>) -> Command {
    let mut command = Command::new(VIRSH);
    // Make virsh's line editor as plain as possible, and leave the user's history alone.
    command
        .env("LC_ALL", "C.UTF-8")
        .env("TERM", "dumb")
        .env("INPUTRC", "/dev/null")
        .env("XDG_CACHE_HOME", "/dev/null/none");
    command.arg("--quiet");
    if let Some(uri) = uri {
        command.args(["--connect", uri]);
    }
    command
}

/// Quotes a word for virsh's own shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

impl Virsh {
    fn start(domain: &str, uri: Option<&str>) -> Result<Self, VirshError> {
        let mut command = virsh(uri);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(VirshError(format!("{VIRSH} has no standard input")));
        };
        let (domain, uri) = (domain.to_owned(), uri.map(str::to_owned));
        Ok(Self { domain, uri, child, input, output, unread: Vec::new(), count: 0, spoilt: false })
    }

    /// Returns QEMU's reply to a command, one line of JSON.
    fn execute(&mut self, command: &str) -> Result<String, VirshError> {
        if self.spoilt {
            return Err(VirshError(format!("{VIRSH} has not answered a command before this one; try again")));
        }
        self.count += 1;
        // virsh prints this line after the reply. If it arrives first, there is no reply.
        let end = format!("rekindle-{}.", self.count);
        let line =
            format!("qemu-monitor-command --domain {} --cmd {}\necho {end}\n", quoted(&self.domain), quoted(command));
        if let Err(e) = self.input.write_all(line.as_bytes()) {
            return Err(self.complaint().unwrap_or_else(|| e.into()));
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            while let Some(at) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=at).collect();
                // Other lines are prompts, with the commands that virsh's line editor repeats.
                if line.starts_with(b"{") {
                    return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
                }
            }
            if self.unread.starts_with(end.as_bytes()) {
                return Err(self
                    .complaint()
                    .unwrap_or_else(|| VirshError(format!("{VIRSH} printed neither a reply nor an error"))));
            }
            if self.unread.len() > LONGEST {
                self.spoilt = true;
                return Err(VirshError(format!("{VIRSH} has printed more than {} MiB", LONGEST >> 20)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let polled = poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&limit));
            match polled {
                // virsh may print without end: check the deadline also after output.
                Ok(_) if left.is_zero() => {
                    self.spoilt = true;
                    return Err(VirshError(format!("{VIRSH} has not answered for {} s", PATIENCE.as_secs())));
                }
                Ok(0) => continue,
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(e) => return Err(io::Error::from(e).into()),
            }
            let mut chunk = [0; 8192];
            match self.output.read(&mut chunk)? {
                0 => return Err(self.complaint().unwrap_or_else(|| VirshError(format!("{VIRSH} has ended")))),
                n => self.unread.extend_from_slice(chunk.get(..n).unwrap_or_default()),
            }
        }
    }

    /// Returns virsh's error output, if there is any.
    fn complaint(&mut self) -> Option<VirshError> {
        words(&waiting_in(self.child.stderr.as_mut()?, COMPLAINT))
    }

    /// Returns QEMU's reply to a command that hands over a descriptor.
    fn execute_with_fd(&self, command: &str, fd: OwnedFd) -> Result<String, VirshError> {
        let mut one = virsh(self.uri.as_deref());
        one.args(["qemu-monitor-command", "--pass-fds", &FD.to_string()]);
        one.args(["--domain", &self.domain, "--cmd", command]).stdin(Stdio::null());
        let mapped = one.fd_mappings(vec![FdMapping { parent_fd: fd, child_fd: FD }]);
        mapped.map_err(|e| VirshError(e.to_string()))?;
        let output = within(&mut one, LONGEST, Instant::now() + PATIENCE)?;
        let reply = String::from_utf8_lossy(&output.out).trim().to_owned();
        if output.status.success() && reply.starts_with('{') {
            return Ok(reply);
        }
        Err(words(&output.err).unwrap_or(VirshError(format!("{VIRSH} ended with {}", output.status))))
    }

    /// Answers as the monitor at the other end of `socket`, until that is closed.
    fn serve(mut self, socket: &UnixStream, version: &Value) {
        let mut out = socket;
        let greeting = json!({"QMP": {"version": version, "capabilities": []}});
        let mut commands = Commands { socket, unread: Vec::new(), fds: Vec::new() };
        if writeln!(out, "{greeting}").is_err() {
            return;
        }
        while let Some((command, fd)) = commands.next() {
            for line in self.answer(&command, fd) {
                if writeln!(out, "{line}").is_err() {
                    return;
                }
            }
        }
    }

    /// Returns the lines that a monitor would write for a command.
    fn answer(&mut self, command: &Value, fd: Option<OwnedFd>) -> Vec<String> {
        let name = command.get("execute").and_then(Value::as_str).unwrap_or_default();
        if name == "qmp_capabilities" {
            return vec![json!({"return": {}}).to_string()];
        }
        // This check detects that another client of libvirt has resumed the guest while we kept it stopped.
        if name == "cont" && self.execute(r#"{"execute":"query-status"}"#).is_ok_and(|status| runs(&status)) {
            let why = "the guest runs already: another client of libvirt has resumed it while it was kept stopped";
            return vec![json!({"error": {"class": "libvirt", "desc": why}}).to_string()];
        }
        let sent = SystemTime::now();
        let reply = match fd {
            None => self.execute(&command.to_string()),
            Some(fd) => self.execute_with_fd(&command.to_string(), fd),
        };
        let reply = match reply {
            Ok(reply) => reply,
            Err(VirshError(text)) => return vec![json!({"error": {"class": "libvirt", "desc": text}}).to_string()],
        };
        let event = match name {
            "stop" => Some(("STOP", sent)),
            "cont" => Some(("RESUME", SystemTime::now())),
            _ => None,
        };
        let done = serde_json::from_str::<Value>(&reply).is_ok_and(|reply| reply.get("return").is_some());
        let mut lines = Vec::new();
        if let Some((event, at)) = event.filter(|_| done) {
            let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            let timestamp = json!({"seconds": at.as_secs(), "microseconds": at.subsec_micros()});
            lines.push(json!({"event": event, "timestamp": timestamp}).to_string());
        }
        lines.push(reply);
        lines
    }
}

/// Returns whether the guest runs, according to QEMU's reply.
fn runs(status: &str) -> bool {
    let status: Option<Value> = serde_json::from_str(status).ok();
    status.and_then(|status| status.pointer("/return/running")?.as_bool()) == Some(true)
}

/// Joins the lines of an error output, without `error: `.
fn words(text: &[u8]) -> Option<VirshError> {
    let text = String::from_utf8_lossy(text);
    let lines: Vec<_> = text.lines().map(|line| line.trim_start_matches("error: ").trim()).collect();
    let text = lines.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    (!text.is_empty()).then_some(VirshError(text))
}

/// Commands read from a socket, each from its first brace to its last, with the descriptor that arrived with it.
struct Commands<'a> {
    socket: &'a UnixStream,
    unread: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Commands<'_> {
    fn next(&mut self) -> Option<(Value, Option<OwnedFd>)> {
        loop {
            let mut values = serde_json::Deserializer::from_slice(&self.unread).into_iter::<Value>();
            match values.next() {
                Some(Ok(command)) => {
                    let end = values.byte_offset();
                    self.unread.drain(..end);
                    return Some((command, self.fds.pop()));
                }
                Some(Err(e)) if !e.is_eof() => return None,
                _ => {}
            }
            let mut chunk = [0; 8192];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let read = {
                let mut parts = [IoSliceMut::new(&mut chunk)];
                match recvmsg(self.socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                    Ok(received) if received.bytes > 0 => received.bytes,
                    Err(Errno::INTR) => continue,
                    _ => return None,
                }
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.fds.extend(fds);
                }
            }
            self.unread.extend_from_slice(chunk.get(..read).unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_whole_at_its_last_brace_and_has_its_descriptor() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut out = &ours;
        out.write_all(br#"{"execute":"a"}{"execute":"b","arguments":{"x":"#).unwrap();
        let mut commands = Commands { socket: &theirs, unread: Vec::new(), fds: Vec::new() };
        assert_eq!(commands.next().unwrap().0["execute"], "a");
        out.write_all(br#""}"}}"#).unwrap();
        let (command, fd) = commands.next().unwrap();
        assert_eq!(command["arguments"]["x"], "}");
        assert!(fd.is_none());
        drop(ours);
        assert!(commands.next().is_none());
    }

    #[test]
    fn words_are_quoted_for_virsh_and_its_errors_are_read() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(words(b"error: one\n\nerror: two\n").unwrap().0, "one; two");
        assert!(words(b"\n").is_none());
        assert!(runs(r#"{"return":{"status":"running","running":true},"id":"libvirt-1"}"#));
        assert!(!runs(r#"{"return":{"status":"paused","running":false}}"#) && !runs("{}") && !runs(""));
    }

    #[test]
    fn an_inaccessible_domain_is_reported_with_virshs_error() {
        // libvirt's built-in test driver has a domain of this name, and no monitor.
        let e = connect("test", Some("test:///default"), Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("not supported by the connection driver"), "{e}");
        let e = connect("it's none", Some("test:///default"), Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("it's none"), "{e}");
    }
}
