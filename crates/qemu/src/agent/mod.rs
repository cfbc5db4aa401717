//! The QEMU guest agent. The protocol is JSON lines as in QMP, but the peer is a program inside the guest, which may
//! be missing, slow, stale or hostile.
//!
//! A connection has one deadline for all requests together, and the size of an answer is limited.

mod exec;
mod freeze;

pub use exec::{ExecError, Ran, boot_id, run};
pub use freeze::{FreezeError, can_freeze, freeze, thaw};

use crate::qmp::{Qmp, QmpError, connect_within};
use rekindle_kernel::lines::Lines;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Limit of an answer in bytes. The largest answers hold the output of a program that was run, which is short.
const LONGEST: usize = 4 << 20;

/// Asks the agent at the socket `path` to shut the guest down.
///
/// On success: an agent received the request. The caller must check that the guest obeys.
///
/// # Errors
/// When no agent answers within `timeout`.
pub fn shut_down(path: &Path, timeout: Duration) -> io::Result<()> {
    let mut agent = Agent::connect(path, timeout)?;
    // The program that froze the file systems may have been killed: a guest that cannot write to them does not shut
    // down.
    if let Err(e) = freeze::thaw_all(&mut agent) {
        tracing::debug!("whether the guest's file systems are frozen is not known: {e}");
    }
    // The agent does not answer a successful shutdown.
    agent.send("guest-shutdown", json!({"mode": "powerdown"}))
}

/// Asks the agent at the socket `path` to set the guest's clock to this host's. A guest that resumes from a
/// checkpoint has the time of the checkpoint.
///
/// # Errors
/// When no agent answers within `timeout`, or the agent returns an error.
pub fn set_time(path: &Path, timeout: Duration) -> io::Result<()> {
    let mut agent = Agent::connect(path, timeout)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
    let ns = i64::try_from(now.as_nanos()).map_err(io::Error::other)?;
    agent.ask("guest-set-time", json!({ "time": ns })).map(drop)
}

/// Returns whether a program in the guest has opened the agent's port. After a load QEMU reports it with a delay.
///
/// # Errors
/// When QEMU does not answer.
pub fn listens(qmp: &mut Qmp) -> Result<bool, QmpError> {
    is_open(qmp, "agent")
}

/// Returns whether a program in the guest has opened the port of this chardev id.
///
/// # Errors
/// When QEMU does not answer.
pub fn is_open(qmp: &mut Qmp, chardev: &str) -> Result<bool, QmpError> {
    let ports: Vec<Value> = qmp.execute("query-chardev", ())?;
    let found = ports.iter().find(|port| port.get("label").and_then(Value::as_str) == Some(chardev));
    Ok(found.and_then(|port| port.get("frontend-open")).and_then(Value::as_bool).unwrap_or(false))
}

/// Returns whether the agent has a command that is not switched off, according to its `guest-info`. An agent that
/// does not list its commands is assumed to have it.
fn has(info: &Value, command: &str) -> bool {
    let Some(commands) = info.get("supported_commands").and_then(Value::as_array) else { return true };
    let found = commands.iter().find(|known| known.get("name").and_then(Value::as_str) == Some(command));
    found.is_some_and(|known| known.get("enabled").and_then(Value::as_bool) != Some(false))
}

/// A connection to an agent that listens.
struct Agent {
    lines: Lines<UnixStream>,
    deadline: Instant,
}

impl Agent {
    /// Connects and checks that an agent listens. Answers that an earlier client left unread are skipped: the answer
    /// to this request has a unique number.
    fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + timeout;
        let stream = connect_within(path, timeout)?;
        let mut agent = Self { lines: Lines::new(stream, LONGEST), deadline };
        // The agent discards a half-read request when it receives this byte, which no JSON has.
        agent.write(&[0xff])?;
        // An answer to one of our earlier connections must not be taken for an answer to this one.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let id = u64::from(std::process::id()) << 24 | (COUNT.fetch_add(1, Ordering::Relaxed) & 0xff_ffff);
        agent.send("guest-sync", json!({ "id": id }))?;
        while agent.answer()?.get("return").and_then(Value::as_u64) != Some(id) {}
        Ok(agent)
    }

    fn send(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        self.write(format!("{}\n", json!({"execute": command, "arguments": arguments})).as_bytes())
    }

    fn write(&self, mut rest: &[u8]) -> io::Result<()> {
        let mut stream = self.lines.stream();
        while !rest.is_empty() {
            stream.set_write_timeout(Some(self.left()?))?;
            match stream.write(rest) {
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns the time until the deadline; `TimedOut` if there is none left.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    /// Sends a command and returns the agent's return value.
    fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        self.send(command, arguments)?;
        let mut answer = self.answer()?;
        match answer.get("error") {
            None => Ok(answer.get_mut("return").map(Value::take).unwrap_or_default()),
            Some(error) => {
                let reason = error.get("desc").and_then(Value::as_str).unwrap_or("without a reason");
                Err(io::Error::other(format!("the guest agent refuses: {reason}")))
            }
        }
    }

    /// Returns the next line; null if the line is not JSON.
    fn answer(&mut self) -> io::Result<Value> {
        // An agent may send lines without end: check the deadline before each.
        self.left()?;
        let line = self.lines.next_by(self.deadline)?;
        Ok(serde_json::from_slice::<Value>(&line).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// A fake agent that serves one connection after the other. In each it answers `guest-sync`, then these commands
    /// in this order. Returns the arguments of the commands.
    pub(super) fn agent(path: &Path, connections: Vec<Vec<(&'static str, Value)>>) -> thread::JoinHandle<Vec<Value>> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let mut asked = Vec::new();
            for answers in connections {
                let (stream, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).split(b'\n');
                let mut out = stream;
                let sync: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()[1..]).unwrap();
                writeln!(out, "{}", json!({"return": sync["arguments"]["id"]})).unwrap();
                for (command, answer) in answers {
                    let line: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()).unwrap();
                    assert_eq!(line["execute"], command);
                    asked.push(line["arguments"].clone());
                    writeln!(out, "{answer}").unwrap();
                }
            }
            asked
        })
    }

    #[test]
    fn a_stale_answer_is_skipped_and_the_guest_is_asked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).split(b'\n');
            let mut out = stream;
            writeln!(out, r#"{{"return": {{"stale": true}}}}"#).unwrap();
            let sync: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()[1..]).unwrap();
            writeln!(out, "{}", json!({"return": sync["arguments"]["id"]})).unwrap();
            let status: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()).unwrap();
            assert_eq!(status["execute"], "guest-fsfreeze-status");
            writeln!(out, "{}", json!({"return": "thawed"})).unwrap();
            String::from_utf8(lines.next().unwrap().unwrap()).unwrap()
        });
        shut_down(&path, Duration::from_secs(10)).unwrap();
        assert!(agent.join().unwrap().contains("guest-shutdown"));
    }

    #[test]
    fn the_clock_is_set_to_now_and_a_refusal_is_reported() {
        for (answer, good) in [
            (json!({"return": {}}), true),
            (json!({"error": {"class": "GenericError", "desc": "settimeofday: EPERM"}}), false),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("agent.sock");
            let listener = UnixListener::bind(&path).unwrap();
            let agent = thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).split(b'\n');
                let mut out = stream;
                let sync: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()[1..]).unwrap();
                writeln!(out, "{}", json!({"return": sync["arguments"]["id"]})).unwrap();
                let asked: Value = serde_json::from_slice(&lines.next().unwrap().unwrap()).unwrap();
                writeln!(out, "{answer}").unwrap();
                asked
            });
            let ns = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
            let before = ns();
            let done = set_time(&path, Duration::from_secs(10));
            let asked = agent.join().unwrap();
            assert_eq!(asked["execute"], "guest-set-time");
            assert!((before..=ns()).contains(&asked["arguments"]["time"].as_u64().unwrap()));
            match done {
                Ok(()) => assert!(good),
                Err(e) => assert!(!good && e.to_string().contains("settimeofday: EPERM"), "{e}"),
            }
        }
    }

    /// A fake agent that sends `what` again and again until the connection is closed.
    fn flood(path: &Path, what: &'static [u8], pause: Duration) -> thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(what).is_ok() {
                thread::sleep(pause);
            }
        })
    }

    #[test]
    fn an_agent_that_never_stops_sending_is_ignored_after_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let patience = Duration::from_millis(300);
        let pause = Duration::from_millis(1);
        let cases: [(&str, &[u8], Duration); 3] =
            [("drips", b"x", pause), ("babbles", b"{}\n", Duration::ZERO), ("floods", &[b'x'; 4096], Duration::ZERO)];
        for (name, what, pause) in cases {
            let path = directory.path().join(name);
            let agent = flood(&path, what, pause);
            let e = set_time(&path, patience).unwrap_err();
            assert!(matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::InvalidData), "{name}: {e}");
            agent.join().unwrap();
        }
    }

    #[test]
    fn a_silent_agent_is_a_timeout() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(shut_down(&path, Duration::from_millis(10)).is_err());
    }
}
