//! Freezes a guest's file systems: all writes are on the guest's disks, and the disks do not change until the thaw.

use super::{Agent, has_command};
use serde_json::json;
use std::io;
use std::path::Path;
use std::time::Duration;

const FREEZE: &str = "guest-fsfreeze-freeze";
const THAW: &str = "guest-fsfreeze-thaw";
const STATUS: &str = "guest-fsfreeze-status";

/// Why a guest's file systems are not frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    #[error("no agent answers in the guest; install and start qemu-guest-agent there")]
    NoAgent(#[source] io::Error),
    #[error(
        "the guest's agent does not freeze file systems ({command} is switched off); allow that: take it off the list of blocked \
         commands in the guest (/etc/sysconfig/qemu-ga, or --block-rpcs, --blacklist of qemu-ga)"
    )]
    Blocked { command: &'static str },
    #[error("the guest's file systems are frozen already, for a backup perhaps; wait for its end")]
    Frozen,
    /// The agent failed to freeze. File systems that it had frozen are thawed again.
    #[error("the guest's file systems cannot be frozen")]
    Failed(#[source] io::Error),
}

/// Checks whether [`freeze`] is possible now. Nothing is changed.
///
/// # Errors
/// [`FreezeError`], as [`freeze`] would return it.
pub fn can_freeze(path: &Path, timeout: Duration) -> Result<(), FreezeError> {
    connect_to_freeze(path, timeout).map(drop)
}

/// Connects to an agent that can freeze, and checks that nothing is frozen.
fn connect_to_freeze(path: &Path, timeout: Duration) -> Result<Agent, FreezeError> {
    let mut agent = Agent::connect(path, timeout).map_err(FreezeError::NoAgent)?;
    if is_frozen(&mut agent).map_err(FreezeError::Failed)? {
        return Err(FreezeError::Frozen);
    }
    let info = agent.ask("guest-info", json!({})).map_err(FreezeError::Failed)?;
    match [FREEZE, THAW].into_iter().find(|command| !has_command(&info, command)) {
        Some(command) => Err(FreezeError::Blocked { command }),
        None => Ok(agent),
    }
}

/// Flushes and freezes all of the guest's file systems that are on disks, through the agent's socket `path`. Returns
/// the number of file systems.
///
/// *On success:* all that programs have written to files is on the disks, nothing is written to them any more, and
/// journals are clean. The agent leaves out file systems that cannot be frozen (VFAT). *On failure:* the guest is
/// unchanged.
///
/// # Errors
/// [`FreezeError`]; also when file systems are frozen already.
pub fn freeze(path: &Path, timeout: Duration) -> Result<u64, FreezeError> {
    match connect_to_freeze(path, timeout)?.ask(FREEZE, json!({})) {
        Ok(count) => Ok(count.as_u64().unwrap_or(0)),
        Err(freeze_error) => {
            // The agent may have frozen some file systems, or may still be freezing.
            if let Err(e) = thaw(path, timeout) {
                tracing::warn!("what the guest's agent has frozen cannot be thawed: {e}");
            }
            Err(FreezeError::Failed(freeze_error))
        }
    }
}

/// Thaws all frozen file systems, through the agent's socket `path`.
///
/// # Errors
/// When no agent answers within `timeout`, or the agent returns an error.
pub fn thaw(path: &Path, timeout: Duration) -> io::Result<()> {
    thaw_all(&mut Agent::connect(path, timeout)?)
}

/// Thaws all frozen file systems over an open connection.
pub(super) fn thaw_all(agent: &mut Agent) -> io::Result<()> {
    if is_frozen(agent)? { agent.ask(THAW, json!({})).map(drop) } else { Ok(()) }
}

fn is_frozen(agent: &mut Agent) -> io::Result<bool> {
    agent.ask(STATUS, json!({})).map(|status| status.as_str() == Some("frozen"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::agent;
    use super::*;
    use serde_json::Value;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn status(text: &str) -> (&'static str, Value) {
        (STATUS, json!({ "return": text }))
    }

    fn info(enabled: bool) -> (&'static str, Value) {
        let commands = json!([{"name": FREEZE, "enabled": enabled}, {"name": THAW, "enabled": true}]);
        ("guest-info", json!({"return": {"version": "7.2", "supported_commands": commands}}))
    }

    #[test]
    fn all_are_frozen_and_thawed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let freezing_agent = agent(&path, vec![vec![status("thawed"), info(true), (FREEZE, json!({"return": 2}))]]);
        assert_eq!(freeze(&path, TIMEOUT).unwrap(), 2);
        freezing_agent.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let thawing_agent = agent(&path, vec![vec![status("frozen"), (THAW, json!({"return": 2}))]]);
        thaw(&path, TIMEOUT).unwrap();
        thawing_agent.join().unwrap();
    }

    #[test]
    fn file_systems_that_were_already_frozen_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let agent = agent(&path, vec![vec![status("frozen")]]);
        assert!(matches!(freeze(&path, TIMEOUT), Err(FreezeError::Frozen)));
        agent.join().unwrap();
    }

    #[test]
    fn a_freeze_that_fails_is_thawed_and_one_that_is_not_allowed_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let refused = json!({"error": {"class": "GenericError", "desc": "failed to freeze /srv: EIO"}});
        let freeze_answers = vec![status("thawed"), info(true), (FREEZE, refused)];
        let thaw_answers = vec![status("frozen"), (THAW, json!({"return": 1}))];
        let failing_agent = agent(&path, vec![freeze_answers, thaw_answers]);
        let e = freeze(&path, TIMEOUT).unwrap_err();
        assert!(std::error::Error::source(&e).unwrap().to_string().contains("failed to freeze /srv"), "{e:?}");
        failing_agent.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let blocking_agent = agent(&path, vec![vec![status("thawed"), info(false)]]);
        let e = can_freeze(&path, TIMEOUT).unwrap_err().to_string();
        assert!(e.contains("guest-fsfreeze-freeze is switched off"), "{e}");
        blocking_agent.join().unwrap();
    }
}
