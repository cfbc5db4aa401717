//! Runs a program in the guest through its agent.

use super::{Agent, has_command};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Interval between two checks whether a program has ended: the agent sends no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Why a program was not run in the guest.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error("no agent answers in the guest; install and start qemu-guest-agent there")]
    NoAgent(#[source] io::Error),
    #[error(
        "the guest's agent does not run programs ({command} is switched off); allow that: take it off the list of blocked \
         commands in the guest (/etc/sysconfig/qemu-ga, or --block-rpcs, --blacklist of qemu-ga)"
    )]
    Blocked { command: &'static str },
    #[error("running {program} in the guest")]
    Failed {
        program: String,
        #[source]
        source: io::Error,
    },
}

/// The result of a program that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramResult {
    /// Exit status; none if a signal has ended the program.
    pub status: Option<i64>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `program` in the guest through the agent's socket `path`, and waits until it ends.
///
/// *On failure:* the program may have run.
///
/// # Errors
/// [`ExecError`], also when the program has not ended within `timeout`.
pub fn run(path: &Path, program: &str, arguments: &[&str], timeout: Duration) -> Result<ProgramResult, ExecError> {
    let mut agent = Agent::connect(path, timeout).map_err(ExecError::NoAgent)?;
    let failed = |source| ExecError::Failed { program: program.into(), source };
    let info = agent.ask("guest-info", json!({})).map_err(failed)?;
    if let Some(command) = ["guest-exec", "guest-exec-status"].into_iter().find(|command| !has_command(&info, command))
    {
        return Err(ExecError::Blocked { command });
    }
    let request = json!({"path": program, "arg": arguments, "capture-output": true});
    let started = agent.ask("guest-exec", request).map_err(failed)?;
    let pid = started.get("pid").cloned().unwrap_or_default();
    let deadline = Instant::now() + timeout;
    loop {
        let status = agent.ask("guest-exec-status", json!({ "pid": pid })).map_err(failed)?;
        if status.get("exited").and_then(Value::as_bool) == Some(true) {
            let (stdout, stderr) = (decoded(&status, "out-data"), decoded(&status, "err-data"));
            return Ok(ProgramResult { status: status.get("exitcode").and_then(Value::as_i64), stdout, stderr });
        }
        if Instant::now() > deadline {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the boot ID of the guest's kernel, which is new with each boot.
///
/// # Errors
/// [`ExecError`], also when the guest has no such file.
pub fn boot_id(path: &Path, timeout: Duration) -> Result<String, ExecError> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let result = run(path, "/bin/cat", &[FILE], timeout)?;
    match result.stdout.trim() {
        "" => Err(ExecError::Failed { program: format!("cat {FILE}"), source: io::Error::other(result.stderr) }),
        id => Ok(id.into()),
    }
}

fn decoded(status: &Value, key: &str) -> String {
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
        let agent = agent(&path, vec![answers]);
        let result = run(&path, "/bin/sh", &["-c", "exit 3"], Duration::from_secs(10)).unwrap();
        assert_eq!(result, ProgramResult { status: Some(3), stdout: "out\n".into(), stderr: "err".into() });
        let arguments = agent.join().unwrap();
        assert_eq!(arguments[1], json!({"path": "/bin/sh", "arg": ["-c", "exit 3"], "capture-output": true}));
        assert_eq!(arguments[3], json!({"pid": 12}));
    }

    #[test]
    fn errors_about_a_missing_agent_and_a_blocked_command_have_a_hint() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let no_agent = run(&path, "/bin/true", &[], Duration::from_millis(50)).unwrap_err();
        assert!(no_agent.to_string().contains("install and start qemu-guest-agent"), "{no_agent}");
        let agent = agent(&path, vec![vec![info(false)]]);
        let blocked = run(&path, "/bin/true", &[], Duration::from_secs(10)).unwrap_err();
        assert!(blocked.to_string().contains("guest-exec is switched off"), "{blocked}");
        agent.join().unwrap();
    }
}
