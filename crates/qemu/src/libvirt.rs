//! A QMP connection through libvirt.
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
const COMMAND_TIMEOUT: Duration = Duration::from_secs(40);
/// Limit of the output for a command.
const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// Limit of the kept error output.
const MAX_ERROR_BYTES: usize = 1 << 16;
/// Number of the descriptor that a `virsh` inherits.
const INHERITED_FD: i32 = 9;

/// Connects to the QEMU of a libvirt domain.
///
/// # Errors
/// [`QmpError::Libvirt`] with virsh's message.
pub fn connect(domain: &str, uri: Option<&str>, timeout: Duration) -> Result<Qmp, QmpError> {
    let failed = |message: String| QmpError::Libvirt { domain: domain.into(), message };
    let mut virsh = Virsh::start(domain, uri).map_err(|e| failed(e.0))?;
    let reply = virsh.execute(r#"{"execute":"query-version"}"#).map_err(|e| failed(e.0))?;
    let version: Value = serde_json::from_str(&reply).map_err(|_| failed(reply.clone()))?;
    let version = version.get("return").cloned().ok_or_else(|| failed(reply))?;
    let (client_end, monitor_end) = UnixStream::pair().map_err(|e| failed(e.to_string()))?;
    let thread = thread::Builder::new().name("virsh".into());
    thread.spawn(move || virsh.serve(&monitor_end, &version)).map_err(|e| failed(e.to_string()))?;
    Qmp::over(client_end, timeout)
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
    command_count: u64,
    /// Whether the next output may belong to a command that timed out.
    is_out_of_step: bool,
}

impl Drop for Virsh {
    fn drop(&mut self) {
        // A killed `virsh` does not write a history file.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn virsh_command(uri: Option<&str>) -> Command {
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
        let mut command = virsh_command(uri);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(VirshError(format!("{VIRSH} has no standard input")));
        };
        let (domain, uri) = (domain.to_owned(), uri.map(str::to_owned));
        let unread = Vec::new();
        Ok(Self { domain, uri, child, input, output, unread, command_count: 0, is_out_of_step: false })
    }

    /// Returns QEMU's reply to a command, one line of JSON.
    fn execute(&mut self, command: &str) -> Result<String, VirshError> {
        if self.is_out_of_step {
            return Err(VirshError(format!("{VIRSH} has not answered a command before this one; try again")));
        }
        self.command_count += 1;
        // virsh prints this line after the reply. If it arrives first, there is no reply.
        let end_mark = format!("rekindle-{}.", self.command_count);
        let (domain, quoted_command) = (quoted(&self.domain), quoted(command));
        let input = format!("qemu-monitor-command --domain {domain} --cmd {quoted_command}\necho {end_mark}\n");
        if let Err(e) = self.input.write_all(input.as_bytes()) {
            return Err(self.error_output().unwrap_or_else(|| e.into()));
        }
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        loop {
            if let Some(reply) = self.take_reply() {
                return Ok(reply);
            }
            if self.unread.starts_with(end_mark.as_bytes()) {
                return Err(self.error_output_or("printed neither a reply nor an error"));
            }
            if self.unread.len() > MAX_OUTPUT_BYTES {
                self.is_out_of_step = true;
                return Err(VirshError(format!("{VIRSH} has printed more than {} MiB", MAX_OUTPUT_BYTES >> 20)));
            }
            self.read_output(deadline)?;
        }
    }

    /// Returns the reply, if a whole line of it was read. Other lines are prompts, with the commands that virsh's line
    /// editor repeats; they are dropped.
    fn take_reply(&mut self) -> Option<String> {
        while let Some(line_end) = self.unread.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=line_end).collect();
            if line.starts_with(b"{") {
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
        }
        None
    }

    /// Waits for output and reads a part of it. May return without having read anything.
    fn read_output(&mut self, deadline: Instant) -> Result<(), VirshError> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: i64::from(remaining.subsec_nanos()) };
        match poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&timeout)) {
            // virsh may print without end: check the deadline also after output.
            Ok(_) if remaining.is_zero() => {
                self.is_out_of_step = true;
                return Err(VirshError(format!("{VIRSH} has not answered for {} s", COMMAND_TIMEOUT.as_secs())));
            }
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(io::Error::from(e).into()),
        }
        let mut chunk = [0; 8192];
        match self.output.read(&mut chunk)? {
            0 => Err(self.error_output_or("has ended")),
            count => {
                self.unread.extend_from_slice(chunk.get(..count).unwrap_or_default());
                Ok(())
            }
        }
    }

    /// Returns virsh's error output, if there is any.
    fn error_output(&mut self) -> Option<VirshError> {
        error_text(&waiting_in(self.child.stderr.as_mut()?, MAX_ERROR_BYTES))
    }

    /// Returns virsh's error output, or else what virsh did.
    fn error_output_or(&mut self, what: &str) -> VirshError {
        self.error_output().unwrap_or_else(|| VirshError(format!("{VIRSH} {what}")))
    }

    /// Returns QEMU's reply to a command that hands over a descriptor.
    fn execute_with_fd(&self, command: &str, fd: OwnedFd) -> Result<String, VirshError> {
        let mut virsh = virsh_command(self.uri.as_deref());
        virsh.args(["qemu-monitor-command", "--pass-fds", &INHERITED_FD.to_string()]);
        virsh.args(["--domain", &self.domain, "--cmd", command]).stdin(Stdio::null());
        let mapped = virsh.fd_mappings(vec![FdMapping { parent_fd: fd, child_fd: INHERITED_FD }]);
        mapped.map_err(|e| VirshError(e.to_string()))?;
        let output = within(&mut virsh, MAX_OUTPUT_BYTES, Instant::now() + COMMAND_TIMEOUT)?;
        let reply = String::from_utf8_lossy(&output.out).trim().to_owned();
        if output.status.success() && reply.starts_with('{') {
            return Ok(reply);
        }
        Err(error_text(&output.err).unwrap_or(VirshError(format!("{VIRSH} ended with {}", output.status))))
    }

    /// Answers as the monitor at the other end of `socket`, until that is closed.
    fn serve(mut self, socket: &UnixStream, version: &Value) {
        let mut out = socket;
        let greeting = json!({"QMP": {"version": version, "capabilities": []}});
        let mut commands = CommandReader { socket, unread: Vec::new(), fds: Vec::new() };
        if writeln!(out, "{greeting}").is_err() {
            return;
        }
        while let Some(ReceivedCommand { command, fd }) = commands.next() {
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
        if name == "cont" && self.execute(r#"{"execute":"query-status"}"#).is_ok_and(|status| is_running(&status)) {
            let why = "the guest runs already: another client of libvirt has resumed it while it was kept stopped";
            return vec![error_line(why)];
        }
        let sent_at = SystemTime::now();
        let reply = match fd {
            None => self.execute(&command.to_string()),
            Some(fd) => self.execute_with_fd(&command.to_string(), fd),
        };
        let reply = match reply {
            Ok(reply) => reply,
            Err(VirshError(text)) => return vec![error_line(&text)],
        };
        let is_success = serde_json::from_str::<Value>(&reply).is_ok_and(|reply| reply.get("return").is_some());
        match name {
            "stop" if is_success => vec![event_line("STOP", sent_at), reply],
            "cont" if is_success => vec![event_line("RESUME", SystemTime::now()), reply],
            _ => vec![reply],
        }
    }
}

/// Returns the line of a monitor's error reply.
fn error_line(text: &str) -> String {
    json!({"error": {"class": "libvirt", "desc": text}}).to_string()
}

fn event_line(name: &str, time: SystemTime) -> String {
    let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let timestamp = json!({"seconds": since_1970.as_secs(), "microseconds": since_1970.subsec_micros()});
    json!({"event": name, "timestamp": timestamp}).to_string()
}

/// Returns whether the guest runs, according to QEMU's reply to `query-status`.
fn is_running(status: &str) -> bool {
    let status: Option<Value> = serde_json::from_str(status).ok();
    status.and_then(|status| status.pointer("/return/running")?.as_bool()) == Some(true)
}

/// Joins the lines of an error output, without `error: `.
fn error_text(output: &[u8]) -> Option<VirshError> {
    let output = String::from_utf8_lossy(output);
    let lines = output.lines().map(|line| line.trim_start_matches("error: ").trim());
    let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    (!text.is_empty()).then_some(VirshError(text))
}

/// A command of the client, with the descriptor that arrived with it.
struct ReceivedCommand {
    command: Value,
    fd: Option<OwnedFd>,
}

/// Reads commands from a socket, each from its first brace to its last.
struct CommandReader<'a> {
    socket: &'a UnixStream,
    unread: Vec<u8>,
    /// Descriptors of a command that is not complete yet.
    fds: Vec<OwnedFd>,
}

impl CommandReader<'_> {
    /// Returns the next command; `None` if the client has closed the socket, or sends something else.
    fn next(&mut self) -> Option<ReceivedCommand> {
        loop {
            let mut values = serde_json::Deserializer::from_slice(&self.unread).into_iter::<Value>();
            match values.next() {
                Some(Ok(command)) => {
                    let end = values.byte_offset();
                    self.unread.drain(..end);
                    return Some(ReceivedCommand { command, fd: self.fds.pop() });
                }
                Some(Err(e)) if !e.is_eof() => return None,
                _ => self.receive()?,
            }
        }
    }

    /// Receives some bytes and descriptors; `None` if the client has closed the socket.
    fn receive(&mut self) -> Option<()> {
        let mut chunk = [0; 8192];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut chunk)];
        let count = match recvmsg(self.socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes > 0 => received.bytes,
            Err(Errno::INTR) => 0,
            _ => return None,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        self.unread.extend_from_slice(chunk.get(..count).unwrap_or_default());
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_at_its_last_brace() {
        let (client_end, monitor_end) = UnixStream::pair().unwrap();
        let mut client = &client_end;
        client.write_all(br#"{"execute":"a"}{"execute":"b","arguments":{"x":"#).unwrap();
        let mut commands = CommandReader { socket: &monitor_end, unread: Vec::new(), fds: Vec::new() };
        assert_eq!(commands.next().unwrap().command["execute"], "a");
        client.write_all(br#""}"}}"#).unwrap();
        let ReceivedCommand { command, fd } = commands.next().unwrap();
        assert_eq!(command["arguments"]["x"], "}");
        assert!(fd.is_none());
        drop(client_end);
        assert!(commands.next().is_none());
    }

    #[test]
    fn words_are_quoted_for_virsh_and_its_errors_are_read() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(error_text(b"error: one\n\nerror: two\n").unwrap().0, "one; two");
        assert!(error_text(b"\n").is_none());
        assert!(is_running(r#"{"return":{"status":"running","running":true},"id":"libvirt-1"}"#));
        assert!(!is_running(r#"{"return":{"status":"paused","running":false}}"#));
        assert!(!is_running("{}") && !is_running(""));
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
