//! The connection of a move to the other host: `rekindle receive` over ssh. A message or an answer is a line.

use super::protocol::{Answer, MAX_LINE_BYTES, Message};
use rekindle_kernel::lines::{self, Lines, write_by};
use rekindle_kernel::output::waiting_in;
use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the remote Rekindle may take to end after the connection is closed.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that can be sent while the remote Rekindle does not read.
const PIPE_BYTES: usize = 1 << 20;
/// How long to wait for output that the remote Rekindle wrote before it ended.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the write of a line may take for which the pipe should have room. The guest is stopped meanwhile.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// Another host, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteHost {
    /// Name of the host on ssh's command line.
    pub host: String,
    /// The command that runs a command on the host, with its options: e.g. `ssh -p 2222`. It gets two arguments: the
    /// host, and one string for the host's shell.
    pub ssh: String,
    /// Path of Rekindle on the host.
    pub rekindle: String,
}

/// Why another host gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The ssh command cannot be started.
    #[error("`{command}` cannot be started")]
    Start {
        command: String,
        #[source]
        source: io::Error,
    },
    /// The host's name is empty, or ssh would parse it as an option.
    #[error("`{host}` cannot be the name of a host")]
    Host { host: String },
    /// The remote Rekindle, or ssh, has ended.
    #[error("the connection to {host} has broken; check what `{command}` prints there")]
    Broken {
        host: String,
        /// The command that was run on the host.
        command: String,
    },
    /// The answer is not in the protocol.
    #[error("{host} answers `{answer}`, which is not an answer of Rekindle; do both hosts have the same version?")]
    NotAnAnswer {
        host: String,
        /// The beginning of the answer.
        answer: String,
    },
    /// The answer's line is too long.
    #[error("{host} answers with more than {} MiB; check what `{command}` prints there", MAX_LINE_BYTES >> 20)]
    TooLong {
        host: String,
        /// The command that was run on the host.
        command: String,
    },
    /// The host has not read a message, or has not sent a complete answer, in time.
    #[error("{host} has not answered within {} s", timeout.as_secs())]
    Silent { host: String, timeout: Duration },
}

impl RemoteHost {
    fn remote_command(&self) -> String {
        format!("{} receive", shell_quoted(&self.rekindle))
    }

    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        // The shell splits only the words in `ssh`.
        command.args(["-c", &format!("exec {} \"$@\"", self.ssh), "sh", &self.host, &self.remote_command()]);
        command
    }

    /// Starts Rekindle on the host.
    pub(super) fn connect(&self) -> Result<Connection, ConnectionError> {
        if self.host.is_empty() || self.host.starts_with('-') {
            return Err(ConnectionError::Host { host: self.host.clone() });
        }
        let failed = |source| ConnectionError::Start { command: self.ssh.clone(), source };
        let spawned = self.command().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(failed)?;
        let input = child.stdin.take();
        if let Some(pipe) = &input {
            // The pipe's default size is too small for a line of state.
            let _ = fcntl_setpipe_size(pipe, PIPE_BYTES);
        }
        let Some(output) = child.stdout.take() else { return Err(failed(io::ErrorKind::BrokenPipe.into())) };
        let answers = Lines::new(File::from(OwnedFd::from(output)), MAX_LINE_BYTES);
        Ok(Connection { host: self.host.clone(), command: self.remote_command(), child, input, answers })
    }
}

/// Encodes a message.
fn encode(message: &Message) -> Option<Vec<u8>> {
    let mut line = serde_json::to_vec(message).ok()?;
    line.push(b'\n');
    Some(line)
}

/// Quotes `word` for a shell.
fn shell_quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A connection to Rekindle on another host. Dropping it ends the remote Rekindle.
#[derive(Debug)]
pub(super) struct Connection {
    host: String,
    /// The command that runs on the host.
    command: String,
    child: Child,
    /// The remote Rekindle's standard input; none after a failed write.
    input: Option<ChildStdin>,
    answers: Lines<File>,
}

impl Connection {
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Returns the error for a remote Rekindle that has ended.
    fn broken(&self) -> ConnectionError {
        ConnectionError::Broken { host: self.host.clone(), command: self.command.clone() }
    }

    /// Writes `line` within `timeout`. After an error, no further line can be written, because part of this one may
    /// have been sent.
    fn write(&mut self, line: &[u8], timeout: Duration) -> Result<(), ConnectionError> {
        let Some(input) = &mut self.input else { return Err(self.broken()) };
        write_by(input, line, Instant::now() + timeout).map_err(|e| {
            self.input = None;
            match e {
                lines::LineError::Late => ConnectionError::Silent { host: self.host.clone(), timeout },
                _ => self.broken(),
            }
        })
    }

    /// Sends a message, which the remote Rekindle has to read within `timeout`.
    pub(super) fn send(&mut self, message: &Message, timeout: Duration) -> Result<(), ConnectionError> {
        let line = encode(message).ok_or_else(|| self.broken())?;
        self.write(&line, timeout)
    }

    /// Sends a message if the pipe has room for it. The pipe is empty, because all earlier messages were answered.
    /// Returns whether the message was sent.
    pub(super) fn send_if_room(&mut self, message: &Message) -> Result<bool, ConnectionError> {
        let line = encode(message).ok_or_else(|| self.broken())?;
        let pipe_bytes = self.input.as_ref().and_then(|pipe| fcntl_getpipe_size(pipe).ok()).unwrap_or(0);
        if line.len() > pipe_bytes {
            return Ok(false);
        }
        self.write(&line, WRITE_TIMEOUT).map(|()| true)
    }

    /// Reads an answer, which must be complete within `timeout`.
    pub(super) fn read_answer(&mut self, timeout: Duration) -> Result<Answer, ConnectionError> {
        let host = || self.host.clone();
        let line = self.answers.next_by(Instant::now() + timeout).map_err(|e| match e {
            lines::LineError::Late => ConnectionError::Silent { host: host(), timeout },
            lines::LineError::TooLong { .. } => {
                ConnectionError::TooLong { host: host(), command: self.command.clone() }
            }
            lines::LineError::Closed | lines::LineError::Io(_) => self.broken(),
        })?;
        serde_json::from_slice(&line).map_err(|_| {
            let answer = String::from_utf8_lossy(&line).trim_end().chars().take(200).collect();
            ConnectionError::NotAnAnswer { host: host(), answer }
        })
    }

    /// Sends a message and reads its answer. `timeout` applies to each of the two.
    pub(super) fn ask(&mut self, message: &Message, timeout: Duration) -> Result<Answer, ConnectionError> {
        let broken = match self.send(message, timeout) {
            Ok(()) => return self.read_answer(timeout),
            Err(silent @ ConnectionError::Silent { .. }) => return Err(silent),
            Err(broken) => broken,
        };
        // The remote Rekindle may have sent the reason before it ended.
        match self.read_answer(LAST_ANSWER_TIMEOUT) {
            Ok(rejected @ Answer::Refused { .. }) => Ok(rejected),
            Err(answer @ ConnectionError::NotAnAnswer { .. }) => Err(answer),
            _ => Err(broken),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The remote Rekindle ends by itself at the end of its input, and removes the QEMU that it has prepared.
        self.input = None;
        let deadline = Instant::now() + END_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                break;
            }
            // A full pipe would block the remote Rekindle before its end.
            let _ = waiting_in(&mut self.answers.stream(), MAX_LINE_BYTES);
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::super::stopped_state::StoppedState;
    use super::*;
    use rekindle_vm::disks::Epochs;

    fn remote(ssh: &str, rekindle: &str) -> RemoteHost {
        RemoteHost { host: "b".into(), ssh: ssh.into(), rekindle: rekindle.into() }
    }

    /// Returns a message of more than `bytes` bytes.
    fn state(bytes: usize) -> Message {
        let (devices_changed, changed) = (Vec::new(), Vec::new());
        let (devices, content, epochs) = (String::new(), "A".repeat(bytes), Epochs::new());
        Message::State(StoppedState {
            checkpoint: 1,
            devices_bytes: 0,
            devices_changed,
            devices,
            epochs,
            changed,
            content,
        })
    }

    #[test]
    fn the_ssh_command_gets_the_host_and_one_text() {
        // Imitates ssh, which passes one string to the host's shell.
        let script = r#"sh -c 'shift; printf "{\"refused\":{\"why\":\"%s\"}}\n" "$*"' -- -x"#;
        let mut connection = remote(script, "/opt/it is/rekindle").connect().unwrap();
        let Answer::Refused { why } = connection.read_answer(END_TIMEOUT).unwrap() else { panic!("another answer") };
        assert_eq!(why, "b '/opt/it is/rekindle' receive");
        assert_eq!(shell_quoted("it's"), r"'it'\''s'");
        assert!(matches!(connection.read_answer(END_TIMEOUT), Err(ConnectionError::Broken { .. })));
    }

    #[test]
    fn an_error_quotes_what_is_not_an_answer() {
        let mut connection = remote("echo Permission denied #", "rekindle").connect().unwrap();
        let e = connection.read_answer(END_TIMEOUT).unwrap_err().to_string();
        assert!(e.contains("Permission denied"), "{e}");
    }

    #[test]
    fn an_error_quotes_what_was_printed_before_the_end() {
        let mut connection = remote("echo Permission denied #", "rekindle").connect().unwrap();
        connection.child.wait().unwrap();
        let e = connection.ask(&Message::Prepare {}, END_TIMEOUT).unwrap_err().to_string();
        assert!(e.contains("Permission denied"), "{e}");
        let e = connection.ask(&Message::Prepare {}, END_TIMEOUT).unwrap_err();
        assert!(matches!(e, ConnectionError::Broken { .. }), "{e}");
    }

    #[test]
    fn a_host_that_looks_like_an_option_is_rejected() {
        let remote = RemoteHost { host: "-oProxyCommand=x".into(), ..remote("ssh", "rekindle") };
        assert!(matches!(remote.connect(), Err(ConnectionError::Host { .. })));
    }

    #[test]
    fn a_message_for_which_the_pipe_has_no_room_is_not_sent() {
        let mut connection = remote("sleep 60 #", "rekindle").connect().unwrap();
        assert!(connection.send_if_room(&state(PIPE_BYTES / 2)).unwrap());
        assert!(!connection.send_if_room(&state(PIPE_BYTES)).unwrap());
        connection.child.kill().unwrap();
    }

    #[test]
    fn a_silent_host_is_not_a_broken_connection() {
        let mut connection = remote("cat #", "rekindle").connect().unwrap();
        assert!(matches!(connection.read_answer(Duration::from_millis(1)), Err(ConnectionError::Silent { .. })));
    }

    #[test]
    fn a_host_that_reads_nothing_is_a_timeout() {
        let mut connection = remote("sleep 10 #", "rekindle").connect().unwrap();
        let e = connection.ask(&state(2 * PIPE_BYTES), Duration::from_millis(50)).unwrap_err();
        assert!(matches!(e, ConnectionError::Silent { .. }), "{e}");
        // The host has read part of a line, so no other line may follow.
        let e = connection.send(&Message::Prepare {}, END_TIMEOUT).unwrap_err();
        assert!(matches!(e, ConnectionError::Broken { .. }), "{e}");
        connection.child.kill().unwrap();
    }

    #[test]
    fn a_line_without_an_end_is_an_error() {
        let mut connection = remote("yes $(printf %0100d 0) | tr -d '\\n' #", "rekindle").connect().unwrap();
        let e = connection.read_answer(END_TIMEOUT).unwrap_err();
        assert!(matches!(e, ConnectionError::TooLong { .. }), "{e}");
        connection.child.kill().unwrap();
    }
}
