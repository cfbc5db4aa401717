//! Runs programs of the host, such as `systemctl` and `modprobe`.

use super::HostError;
use std::process::Command;

/// Runs `program` to its end.
///
/// # Errors
/// [`HostError::Command`] if the program cannot be started or fails, with its standard error.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), HostError> {
    let failed = |output: String| HostError::Command { command: format!("{program} {}", arguments.join(" ")), output };
    let output = Command::new(program).args(arguments).output().map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(failed(if stderr.is_empty() { output.status.to_string() } else { stderr }))
}
