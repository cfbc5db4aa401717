//! The QEMU guest agent. The protocol is JSON lines as in QMP, but the peer is a program inside the guest, which may
//! be missing, slow, stale or hostile.
//!
//! A connection has one deadline for all requests together, and the size of an answer is limited.

mod exec;
mod freeze;

pub use exec::{ExecError, ProgramResult, boot_id, run};
pub use freeze::{FreezeError, can_freeze, freeze, thaw};

use crate::qmp::{Qmp, QmpError};
use crate::socket;
use rekindle_kernel::lines::Lines;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Limit of an answer. The largest answers hold the output of a program that was run, which is short.
const MAX_ANSWER_BYTES: usize = 4 << 20;

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

/// Asks the agent at the socket `path` to set the guest's clock to this host's. A guest that was stopped has the time
/// at which it was stopped.
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
pub fn is_listening(qmp: &mut Qmp) -> Result<bool, QmpError> {
    is_port_open(qmp, "agent")
}

/// Returns whether a program in the guest has opened the port of this chardev id.
///
/// # Errors
/// When QEMU does not answer.
pub fn is_port_open(qmp: &mut Qmp, chardev: &str) -> Result<bool, QmpError> {
    let ports: Vec<Value> = qmp.execute("query-chardev", ())?;
    let port = ports.iter().find(|port| port.get("label").and_then(Value::as_str) == Some(chardev));
    Ok(port.and_then(|port| port.get("frontend-open")).and_then(Value::as_bool).unwrap_or(false))
}

/// Returns whether the agent has a command that is not switched off, according to its `guest-info`. An agent that
/// does not list its commands is assumed to have it.
fn has_command(info: &Value, name: &str) -> bool {
    let Some(commands) = info.get("supported_commands").and_then(Value::as_array) else { return true };
    let command = commands.iter().find(|command| command.get("name").and_then(Value::as_str) == Some(name));
    command.is_some_and(|command| command.get("enabled").and_then(Value::as_bool) != Some(false))
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
        let stream = socket::connect(path, timeout)?;
        let mut agent = Self { lines: Lines::new(stream, MAX_ANSWER_BYTES), deadline };
        // The agent discards a half-read request when it receives this byte, which no JSON has.
        agent.write(&[0xff])?;
        // An answer to one of our earlier connections must not be taken for an answer to this one.
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        let id = u64::from(std::process::id()) << 24 | (CONNECTIONS.fetch_add(1, Ordering::Relaxed) & 0xff_ffff);
        agent.send("guest-sync", json!({ "id": id }))?;
        while agent.answer()?.get("return").and_then(Value::as_u64) != Some(id) {}
        Ok(agent)
    }

    fn send(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        self.write(format!("{}\n", json!({"execute": command, "arguments": arguments})).as_bytes())
    }

    fn write(&self, mut unsent: &[u8]) -> io::Result<()> {
        let mut stream = self.lines.stream();
        while !unsent.is_empty() {
            stream.set_write_timeout(Some(self.remaining_time()?))?;
            match stream.write(unsent) {
                Ok(written) => unsent = unsent.get(written..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns the time until the deadline; `TimedOut` if there is none left.
    fn remaining_time(&self) -> io::Result<Duration> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(remaining) }
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
        self.remaining_time()?;
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

    /// The agent's end of a connection.
    struct Connection {
        requests: BufReader<UnixStream>,
        answers: UnixStream,
    }

    impl Connection {
        fn accept(listener: &UnixListener) -> Self {
            let (stream, _) = listener.accept().unwrap();
            Self { requests: BufReader::new(stream.try_clone().unwrap()), answers: stream }
        }

        fn next_request(&mut self) -> Value {
            let mut line = Vec::new();
            self.requests.read_until(b'\n', &mut line).unwrap();
            // The first request follows the byte that discards a half-read one.
            serde_json::from_slice(line.strip_prefix(&[0xff]).unwrap_or(&line)).unwrap()
        }

        fn answer(&mut self, answer: &Value) {
            writeln!(self.answers, "{answer}").unwrap();
        }

        fn answer_sync(&mut self) {
            let sync = self.next_request();
            assert_eq!(sync["execute"], "guest-sync");
            self.answer(&json!({"return": sync["arguments"]["id"]}));
        }
    }

    /// A fake agent that serves one connection after the other. In each it answers `guest-sync`, then these commands
    /// in this order. Returns the arguments of the commands.
    pub(super) fn agent(path: &Path, connections: Vec<Vec<(&'static str, Value)>>) -> thread::JoinHandle<Vec<Value>> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let mut arguments = Vec::new();
            for answers in connections {
                let mut connection = Connection::accept(&listener);
                connection.answer_sync();
                for (command, answer) in answers {
                    let request = connection.next_request();
                    assert_eq!(request["execute"], command);
                    arguments.push(request["arguments"].clone());
                    connection.answer(&answer);
                }
            }
            arguments
        })
    }

    #[test]
    fn a_stale_answer_is_skipped_and_the_guest_is_shut_down() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let mut connection = Connection::accept(&listener);
            connection.answer(&json!({"return": {"stale": true}}));
            connection.answer_sync();
            assert_eq!(connection.next_request()["execute"], "guest-fsfreeze-status");
            connection.answer(&json!({"return": "thawed"}));
            connection.next_request()
        });
        shut_down(&path, Duration::from_secs(10)).unwrap();
        assert_eq!(agent.join().unwrap()["execute"], "guest-shutdown");
    }

    #[test]
    fn the_clock_is_set_to_now_and_a_refusal_is_reported() {
        let refusal = json!({"error": {"class": "GenericError", "desc": "settimeofday: EPERM"}});
        for (answer, is_set) in [(json!({"return": {}}), true), (refusal, false)] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("agent.sock");
            let agent = agent(&path, vec![vec![("guest-set-time", answer)]]);
            let now_ns = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
            let began_ns = now_ns();
            let result = set_time(&path, Duration::from_secs(10));
            let arguments = agent.join().unwrap();
            assert!((began_ns..=now_ns()).contains(&arguments[0]["time"].as_u64().unwrap()));
            match result {
                Ok(()) => assert!(is_set),
                Err(e) => assert!(!is_set && e.to_string().contains("settimeofday: EPERM"), "{e}"),
            }
        }
    }

    /// A fake agent that sends `bytes` again and again until the connection is closed.
    fn flood(path: &Path, bytes: &'static [u8], interval: Duration) -> thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(bytes).is_ok() {
                thread::sleep(interval);
            }
        })
    }

    #[test]
    fn an_agent_that_never_stops_sending_is_ignored_after_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let cases: [(&str, &[u8], Duration); 3] = [
            ("single-bytes", b"x", Duration::from_millis(1)),
            ("empty-answers", b"{}\n", Duration::ZERO),
            ("endless-line", &[b'x'; 4096], Duration::ZERO),
        ];
        for (name, bytes, interval) in cases {
            let path = directory.path().join(name);
            let agent = flood(&path, bytes, interval);
            let e = set_time(&path, Duration::from_millis(300)).unwrap_err();
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
