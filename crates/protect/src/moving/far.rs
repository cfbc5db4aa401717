//! The other host: how it is reached, and the line to its Rekindle.

use super::protocol::{Answer, LONGEST, Say};
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

/// How long the other side may take to end once it is not needed any more.
const END: Duration = Duration::from_secs(30);
/// Bytes that it can be told at once.
const PIPE: usize = 1 << 20;
/// How long what it has written before its end may be on its way.
const LAST: Duration = Duration::from_secs(1);
/// How long a line may take for which the pipe should have room. The guest is stopped meanwhile.
const ROOM: Duration = Duration::from_millis(100);

/// How another host is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Far {
    /// The host, as ssh knows it.
    pub host: String,
    /// The command that runs another one there, with its options: `ssh -p 2222`. It is given the host and one text, for a shell there.
    pub ssh: String,
    /// Rekindle's program there.
    pub rekindle: String,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The command that leads there does not start, or its name is none.
    #[error("`{command}` cannot be started")]
    Start {
        /// What was started.
        command: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A host that a program would take for an option.
    #[error("`{host}` cannot be the name of a host")]
    Host {
        /// What was named.
        host: String,
    },
    /// It has ended.
    #[error("the line to {host} has broken; see what `{command}` says there")]
    Broken {
        /// The host.
        host: String,
        /// The program there.
        command: String,
    },
    /// It says what makes no sense.
    #[error("{host} answers `{said}`, which is no answer of Rekindle's; are both of the same version?")]
    Odd {
        /// The host.
        host: String,
        /// The beginning of what it says.
        said: String,
    },
    /// It sends a line that is longer than any answer.
    #[error("{host} answers with more than {} MiB; see what `{command}` prints there", LONGEST >> 20)]
    TooLong {
        /// The host.
        host: String,
        /// The program there.
        command: String,
    },
    /// It has not read what was sent, or has sent nothing or only the beginning of an answer.
    #[error("{host} has not answered within {} s", patience.as_secs())]
    Silent {
        /// The host.
        host: String,
        /// How long it was waited.
        patience: Duration,
    },
}

impl Far {
    fn remote(&self) -> String {
        format!("{} receive", quoted(&self.rekindle))
    }

    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        // The shell splits what the owner has written, and nothing else.
        command.args(["-c", &format!("exec {} \"$@\"", self.ssh), "sh", &self.host, &self.remote()]);
        command
    }

    /// Start Rekindle there.
    pub(super) fn connect(&self) -> Result<Line, LineError> {
        if self.host.is_empty() || self.host.starts_with('-') {
            return Err(LineError::Host { host: self.host.clone() });
        }
        let failed = |source| LineError::Start { command: self.ssh.clone(), source };
        let spawned = self.command().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(failed)?;
        let to = child.stdin.take();
        if let Some(to) = &to {
            // A shorter one takes less at once.
            let _ = fcntl_setpipe_size(to, PIPE);
        }
        let Some(from) = child.stdout.take() else { return Err(failed(io::ErrorKind::BrokenPipe.into())) };
        let answers = Lines::new(File::from(OwnedFd::from(from)), LONGEST);
        Ok(Line { host: self.host.clone(), command: self.remote(), child, to, answers })
    }
}

/// As it goes over the line.
fn line_of(say: &Say) -> Option<Vec<u8>> {
    let mut line = serde_json::to_vec(say).ok()?;
    line.push(b'\n');
    Some(line)
}

/// As one word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A line to Rekindle on another host. Dropped, it ends what is there.
#[derive(Debug)]
pub(super) struct Line {
    host: String,
    command: String,
    child: Child,
    to: Option<ChildStdin>,
    answers: Lines<File>,
}

impl Line {
    /// Where it leads.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    fn broken(&self) -> LineError {
        LineError::Broken { host: self.host.clone(), command: self.command.clone() }
    }

    /// Writes `line` within `patience`. After an error the line may have been written in part, so nothing is written any more.
    fn write(&mut self, line: &[u8], patience: Duration) -> Result<(), LineError> {
        let Some(to) = &mut self.to else { return Err(self.broken()) };
        write_by(to, line, Instant::now() + patience).map_err(|e| {
            self.to = None;
            match e {
                lines::LineError::Late => LineError::Silent { host: self.host.clone(), patience },
                _ => self.broken(),
            }
        })
    }

    /// Say something, which the other side has to read within `patience`.
    pub(super) fn say(&mut self, say: &Say, patience: Duration) -> Result<(), LineError> {
        let line = line_of(say).ok_or_else(|| self.broken())?;
        self.write(&line, patience)
    }

    /// Say something if that does not take until somebody hears it: all that was said before was answered, so the pipe is empty. Gives
    /// whether it was said.
    pub(super) fn say_at_once(&mut self, say: &Say) -> Result<bool, LineError> {
        let line = line_of(say).ok_or_else(|| self.broken())?;
        let room = self.to.as_ref().and_then(|to| fcntl_getpipe_size(to).ok()).unwrap_or(0);
        if line.len() > room {
            return Ok(false);
        }
        self.write(&line, ROOM).map(|()| true)
    }

    /// What it answers: the whole of it has to be there within `patience`.
    pub(super) fn answer(&mut self, patience: Duration) -> Result<Answer, LineError> {
        let host = || self.host.clone();
        let line = self.answers.next_by(Instant::now() + patience).map_err(|e| match e {
            lines::LineError::Late => LineError::Silent { host: host(), patience },
            lines::LineError::TooLong { .. } => LineError::TooLong { host: host(), command: self.command.clone() },
            lines::LineError::Closed | lines::LineError::Io(_) => {
                LineError::Broken { host: host(), command: self.command.clone() }
            }
        })?;
        serde_json::from_slice(&line).map_err(|_| {
            let said = String::from_utf8_lossy(&line).trim_end().chars().take(200).collect();
            LineError::Odd { host: host(), said }
        })
    }

    /// Say something, and give what it answers. `patience` applies to each of the two.
    pub(super) fn ask(&mut self, say: &Say, patience: Duration) -> Result<Answer, LineError> {
        let broken = match self.say(say, patience) {
            Ok(()) => return self.answer(patience),
            Err(silent @ LineError::Silent { .. }) => return Err(silent),
            Err(broken) => broken,
        };
        // It may have said why before it ended.
        match self.answer(LAST) {
            Ok(refused @ Answer::Refused { .. }) => Ok(refused),
            Err(odd @ LineError::Odd { .. }) => Err(odd),
            _ => Err(broken),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // It ends by itself when it hears nothing more, and takes back what it has prepared.
        self.to = None;
        let deadline = Instant::now() + END;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                break;
            }
            // A full pipe would block it before its end.
            let _ = waiting_in(&mut self.answers.stream(), LONGEST);
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::super::protocol::State;
    use super::*;
    use rekindle_vm::disks::Epochs;

    fn far(ssh: &str, rekindle: &str) -> Far {
        Far { host: "b".into(), ssh: ssh.into(), rekindle: rekindle.into() }
    }

    fn state(len: usize) -> Say {
        let (devices_changed, changed) = (Vec::new(), Vec::new());
        let (devices, content, epochs) = (String::new(), "A".repeat(len), Epochs::new());
        Say::State(State { checkpoint: 1, devices_bytes: 0, devices_changed, devices, epochs, changed, content })
    }

    #[test]
    fn the_owner_s_command_gets_the_host_and_one_text() {
        // As ssh does it: the text is for a shell there.
        let script = r#"sh -c 'shift; printf "{\"refused\":{\"why\":\"%s\"}}\n" "$*"' -- -x"#;
        let mut line = far(script, "/opt/it is/rekindle").connect().unwrap();
        let Answer::Refused { why } = line.answer(END).unwrap() else { panic!("another answer") };
        assert_eq!(why, "b '/opt/it is/rekindle' receive");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert!(matches!(line.answer(END), Err(LineError::Broken { .. })));
    }

    #[test]
    fn what_is_no_answer_is_named() {
        let mut line = far("echo Permission denied #", "rekindle").connect().unwrap();
        let e = line.answer(END).unwrap_err().to_string();
        assert!(e.contains("Permission denied"), "{e}");
    }

    #[test]
    fn what_was_said_before_the_end_is_told() {
        let mut line = far("echo Permission denied #", "rekindle").connect().unwrap();
        line.child.wait().unwrap();
        let e = line.ask(&Say::Prepare {}, END).unwrap_err().to_string();
        assert!(e.contains("Permission denied"), "{e}");
        let e = line.ask(&Say::Prepare {}, END).unwrap_err();
        assert!(matches!(e, LineError::Broken { .. }), "{e}");
    }

    #[test]
    fn a_host_is_no_option() {
        let far = Far { host: "-oProxyCommand=x".into(), ..far("ssh", "rekindle") };
        assert!(matches!(far.connect(), Err(LineError::Host { .. })));
    }

    #[test]
    fn what_would_have_to_wait_for_who_hears_it_is_not_said() {
        let mut line = far("sleep 60 #", "rekindle").connect().unwrap();
        assert!(line.say_at_once(&state(PIPE / 2)).unwrap());
        assert!(!line.say_at_once(&state(PIPE)).unwrap());
        line.child.kill().unwrap();
    }

    #[test]
    fn who_says_nothing_is_told_from_who_is_gone() {
        let mut line = far("cat #", "rekindle").connect().unwrap();
        assert!(matches!(line.answer(Duration::from_millis(1)), Err(LineError::Silent { .. })));
    }

    #[test]
    fn a_host_that_reads_nothing_is_not_waited_for() {
        let mut line = far("sleep 10 #", "rekindle").connect().unwrap();
        let e = line.ask(&state(2 * PIPE), Duration::from_millis(50)).unwrap_err();
        assert!(matches!(e, LineError::Silent { .. }), "{e}");
        // What it has had is a part of a line: no other may follow it.
        let e = line.say(&Say::Prepare {}, END).unwrap_err();
        assert!(matches!(e, LineError::Broken { .. }), "{e}");
        line.child.kill().unwrap();
    }

    #[test]
    fn a_line_without_an_end_is_no_answer() {
        let mut line = far("yes $(printf %0100d 0) | tr -d '\\n' #", "rekindle").connect().unwrap();
        let e = line.answer(END).unwrap_err();
        assert!(matches!(e, LineError::TooLong { .. }), "{e}");
        line.child.kill().unwrap();
    }
}
