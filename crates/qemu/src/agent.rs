//! The QEMU guest agent: JSON lines like QMP, but to a program inside the guest, which may be absent, slow or stale.

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Ask the agent behind the socket at `path` to shut the guest down.
///
/// On success: an agent answered and was asked; that the guest obeys is for the caller to see.
///
/// # Errors
/// When nobody answers within `timeout`.
pub fn shut_down(path: &Path, timeout: Duration) -> io::Result<()> {
    let mut stream = synchronised(path, timeout)?;
    // A successful shutdown is not answered.
    writeln!(stream, "{}", json!({"execute": "guest-shutdown", "arguments": {"mode": "powerdown"}}))
}

/// Connect and make sure that an agent listens: what an earlier client left unread is skipped by a number that only
/// this answer has.
fn synchronised(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + timeout;
    let mut stream = UnixStream::connect(path)?;
    let id = u64::from(std::process::id());
    stream.set_write_timeout(Some(timeout))?;
    // The agent drops what it has half read when it sees this byte, which no JSON has.
    stream.write_all(&[0xff])?;
    writeln!(stream, "{}", json!({"execute": "guest-sync", "arguments": {"id": id}}))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut line = Vec::new();
        if reader.read_until(b'\n', &mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let answer = serde_json::from_slice::<Value>(&line).unwrap_or_default();
        if answer.get("return").and_then(Value::as_u64) == Some(id) {
            return Ok(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

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
            String::from_utf8(lines.next().unwrap().unwrap()).unwrap()
        });
        shut_down(&path, Duration::from_secs(10)).unwrap();
        assert!(agent.join().unwrap().contains("guest-shutdown"));
    }

    #[test]
    fn a_silent_agent_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(shut_down(&path, Duration::from_millis(10)).is_err());
    }
}
