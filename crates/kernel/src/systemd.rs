//! Questions and requests to systemd, by its program `systemctl`.

use crate::output::within;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Exists while systemd manages the host: see `sd_booted(3)`.
const RUNS: &str = "/run/systemd/system";
/// systemd kills a service that has not ended after 90 s (`DefaultTimeoutStopSec`).
const TIMEOUT: Duration = Duration::from_secs(120);
/// Limit of what `systemctl` may print.
const MAX_OUTPUT_BYTES: usize = 1 << 20;

/// Returns whether systemd manages this host.
#[must_use]
pub fn is_running() -> bool {
    Path::new(RUNS).is_dir()
}

/// Runs `systemctl` and returns its output.
///
/// # Errors
/// When it cannot be started, exceeds a limit, or fails: then with its message.
pub fn systemctl(arguments: &[&str]) -> io::Result<String> {
    let mut command = Command::new("systemctl");
    command.args(arguments).stdin(Stdio::null());
    let output = within(&mut command, MAX_OUTPUT_BYTES, Instant::now() + TIMEOUT)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.out).into_owned());
    }
    let message = String::from_utf8_lossy(&output.err).trim().to_owned();
    Err(io::Error::other(if message.is_empty() { output.status.to_string() } else { message }))
}

/// Returns properties of a unit.
///
/// # Errors
/// As for [`systemctl`].
pub fn show(unit: &str, names: &[&str]) -> io::Result<BTreeMap<String, String>> {
    let query = format!("--property={}", names.join(","));
    systemctl(&["show", &query, unit]).map(|text| properties(&text))
}

/// Reads lines of the form `NAME=VALUE`, as `systemctl show` prints them.
#[must_use]
pub fn properties(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_read_up_to_their_first_equals_sign() {
        let found = properties("Id=a.service\nExecStart=x=y\n\nnothing\n");
        let expected = [("ExecStart", "x=y"), ("Id", "a.service")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(found.into_iter().collect::<Vec<(String, String)>>(), expected);
    }
}
