//! Running a program in the guest through its agent.

use super::{Agent, has};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Interval between two checks whether a program has ended: the agent sends no notification.
const POLL: Duration = Duration::from_millis(20);

/// Why a program was not run in the guest.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// No agent answers.
    #[error("no agent answers in the guest; install and start qemu-guest-agent there")]
    NoAgent(#[source] io::Error),
    /// The agent's commands for running programs are switched off.
    #[error(
        "the guest's agent does not run programs ({command} is switched off); allow that: take it off the list of blocked \
         commands in the guest (/etc/sysconfig/qemu-ga, or --block-rpcs, --blacklist of qemu-ga)"
    )]
    Blocked {
        /// The missing command.
        command: &'static str,
    },
    /// The agent reports an error, does not answer, or the program runs for too long.
    #[error("running {program} in the guest")]
    Failed {
        /// The program that was to be run.
        program: String,
        /// The agent's error, or a timeout.
        #[source]
        source: io::Error,
    },
}

/// A program that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Exit status; none if a signal has ended the program.
    pub status: Option<i64>,
    /// Standard output, as text.
    pub out: String,
    /// Standard error, as text.
    pub err: String,
}

/// Runs `program` in the guest through the agent's socket `path`, and waits until it ends.
///
/// *On failure:* the program may have run.
///
/// # Errors
/// [`ExecError`], also when the program has not ended within `timeout`.
pub fn run(path: &Path, program: &str, arguments: &[&str], timeout: Duration) -> Result<Ran, ExecError> {
    let mut agent = Agent::connect(path, timeout).map_err(ExecError::NoAgent)?;
    let failed = |source| ExecError::Failed { program: program.into(), source };
    let info = agent.ask("guest-info", json!({})).map_err(failed)?;
    if let Some(command) = ["guest-exec", "guest-exec-status"].into_iter().find(|command| !has(&info, command)) {
        return Err(ExecError::Blocked { command });
    }
    let wanted = json!({"path": program, "arg": arguments, "capture-output": true});
    let started = agent.ask("guest-exec", wanted).map_err(failed)?;
    let pid = started.get("pid").cloned().unwrap_or_default();
    let deadline = Instant::now() + timeout;
    loop {
        let status = agent.ask("guest-exec-status", json!({ "pid": pid })).map_err(failed)?;
        if status.get("exited").and_then(Value::as_bool) == Some(true) {
            let code = status.get("exitcode").and_then(Value::as_i64);
            return Ok(Ran { status: code, out: text(&status, "out-data"), err: text(&status, "err-data") });
        }
        if Instant::now() > deadline {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        thread::sleep(POLL);
    }
}

/// Returns the boot ID of the guest's kernel, which is new with each boot.
///
/// # Errors
/// [`ExecError`], also when the guest has no such file.
pub fn boot_id(path: &Path, timeout: Duration) -> Result<String, ExecError> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let ran = run(path, "/bin/cat", &[FILE], timeout)?;
    match ran.out.trim() {
        "" => Err(ExecError::Failed { program: format!("cat {FILE}"), source: io::Error::other(ran.err) }),
        id => Ok(id.into()),
    }
}

fn text(status: &Value, key: &str) -> String {
    let encoded = status.get(key).and_then(Value::as_str).unwrap_or_default();
    String::from_utf8_lossy(&STANDARD.decode(encoded).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tests::agent;
    use super::*;

    fn info(enabled: bool) -> (&'static str, Value) {
        let commands =
            json!([{"name": "guest-exec", "enabled": enabled}, {"name": "guest-exec-status", "enabled": true}]);
        ("guest-info", json!({"return": {"version": "7.2", "supported_commands": commands}}))
    }

    #[test]
    fn a_program_is_waited_for_and_its_output_is_returned() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let ended = json!({"return": {"exited": true, "exitcode": 3, "out-data": "b3V0Cg==", "err-data": "ZXJy"}});
        let answers = vec![
            info(true),
            ("guest-exec", json!({"return": {"pid": 12}})),
            ("guest-exec-status", json!({"return": {"exited": false}})),
            ("guest-exec-status", ended),
        ];
        let served = agent(&path, vec![answers]);
        let ran = run(&path, "/bin/sh", &["-c", "exit 3"], Duration::from_secs(10)).unwrap();
        assert_eq!(ran, Ran { status: Some(3), out: "out\n".into(), err: "err".into() });
        let asked = served.join().unwrap();
        assert_eq!(asked[1], json!({"path": "/bin/sh", "arg": ["-c", "exit 3"], "capture-output": true}));
        assert_eq!(asked[3], json!({"pid": 12}));
    }

    #[test]
    fn an_agent_that_runs_nothing_is_named_with_a_hint_and_so_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let none = run(&path, "/bin/true", &[], Duration::from_millis(50)).unwrap_err();
        assert!(none.to_string().contains("install and start qemu-guest-agent"), "{none}");
        let served = agent(&path, vec![vec![info(false)]]);
        let blocked = run(&path, "/bin/true", &[], Duration::from_secs(10)).unwrap_err();
        assert!(blocked.to_string().contains("guest-exec is switched off"), "{blocked}");
        served.join().unwrap();
    }
}
