//! Output of the commands: results as text or JSON, errors with their causes, and the exit status of an error.

use rekindle_handover::GuestStatus;
use rekindle_kernel::descriptor_limit;
use rekindle_protect::moving::MoveError;
use rekindle_protect::owned::StoreGone;
use rekindle_protect::protector::ProtectError;
use rekindle_protect::restore::RestoreError;
use rekindle_reboot::error::{Failure, RebootError};
use rekindle_store::StoreError;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::io::{self, IsTerminal, Write};

/// Printer of results and errors.
#[derive(Debug)]
pub struct Output {
    json: bool,
}

impl Output {
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Returns whether results are printed as JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Prints a result: JSON on one line, or the text.
    pub fn result(&self, value: &impl Serialize, text: impl AsRef<str>) -> io::Result<()> {
        if self.json { self.line(&serde_json::to_string(value)?) } else { self.line(text.as_ref().trim_end()) }
    }

    /// Prints one line to standard output. A closed pipe is not an error.
    pub fn line(&self, text: &str) -> io::Result<()> {
        match writeln!(io::stdout(), "{text}") {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    /// Prints an error with all its causes.
    pub fn error(&self, error: &anyhow::Error) {
        let text = chain(error.as_ref());
        if self.json {
            let mut value = error_fields(error);
            value.insert("error".into(), text.as_str().into());
            value.insert("exit_status".into(), exit_status_of(error).into());
            let _ = self.line(&Value::Object(value).to_string());
        }
        let (red, plain) = if io::stderr().is_terminal() { ("\x1b[31m", "\x1b[0m") } else { ("", "") };
        eprintln!("{red}rekindle:{plain} {text}");
    }
}

/// Formats an error with all its causes, a line for each.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let cause_text = error.to_string();
        // A transparent error repeats the text of its cause.
        if !text.ends_with(&cause_text) {
            text += &format!("\n  because: {cause_text}");
        }
        cause = error.source();
    }
    if is_out_of_descriptors(&text) {
        text += &format!(
            "\n  remedy: raise the limit of open files, which is {} here (RLIMIT_NOFILE): ulimit -n, or LimitNOFILE= in its unit",
            descriptor_limit::current()
        );
    }
    if is_without_credentials(&text) {
        text += "\n  remedy: no credentials for the object store were found: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and \
                 AWS_ENDPOINT_URL, or name a file with them: --environment-file";
    }
    text
}

/// Returns whether the object store's client requested credentials from the metadata service of a cloud, which it does if
/// it has none, and failed.
fn is_without_credentials(text: &str) -> bool {
    text.contains("http://169.254.169.254/")
}

/// Returns whether a call failed with `EMFILE`, in this process or in a QEMU whose log the error quotes.
fn is_out_of_descriptors(text: &str) -> bool {
    text.match_indices("Too many open files").any(|(at, found)| !text[at + found.len()..].starts_with(" in system"))
}

/// Returns the machine-readable fields of an error: its `kind`, and the values that belong to it.
fn error_fields(error: &anyhow::Error) -> Map<String, Value> {
    let move_error = error.downcast_ref::<MoveError>();
    let protect_error = match move_error {
        Some(MoveError::Protect(e)) => Some(e),
        _ => error.downcast_ref::<ProtectError>(),
    };
    if let Some(ProtectError::StoreGone(gone)) = protect_error {
        let StoreGone { name, store, since, .. } = gone;
        let kind = "store-gone";
        return object(json!({"kind": kind, "vm": name, "store": store, "since": since, "remedy": gone.remedy()}));
    }
    let store_error = match (protect_error, move_error, error.downcast_ref::<RestoreError>()) {
        (Some(ProtectError::Store(e)), ..) | (_, Some(MoveError::Store(e)), _) | (.., Some(RestoreError::Store(e))) => {
            Some(e)
        }
        _ => error.downcast_ref::<StoreError>(),
    };
    match store_error {
        None => Map::new(),
        Some(
            e @ (StoreError::NotAStore { store } | StoreError::Unused { store } | StoreError::NotADirectory { store }),
        ) => object(json!({"kind": e.kind(), "store": store})),
        Some(e @ StoreError::Exists { store, vm }) => object(json!({"kind": e.kind(), "store": store, "vm": vm})),
        Some(e) => object(json!({"kind": e.kind()})),
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Returns the exit status for an error.
pub fn exit_status_of(error: &anyhow::Error) -> u8 {
    let reboot_error = error.downcast_ref::<RebootError>();
    let move_error = match reboot_error {
        Some(RebootError::Move(e)) => Some(e),
        _ => error.downcast_ref::<MoveError>(),
    };
    let needs_recovery = reboot_error.is_some_and(RebootError::needs_recovery)
        || move_error.is_some_and(MoveError::needs_recovery)
        || matches!(error.downcast_ref::<RestoreError>(), Some(RestoreError::MayRun { .. }));
    match error.downcast_ref::<Failure>() {
        Some(failure) => exit_status_for(failure.guest),
        None if needs_recovery => 3,
        None if error.downcast_ref::<Usage>().is_some() => 2,
        None => 1,
    }
}

/// Returns the exit status for the state in which a failed reboot left the guest.
pub fn exit_status_for(guest: GuestStatus) -> u8 {
    match guest {
        GuestStatus::Unchanged => 1,
        GuestStatus::NeedsRecovery => 3,
    }
}

/// Error for a wrong command line. The exit status is 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Formats microseconds: `3.4 ms`, `1.20 s`.
pub fn duration(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..100_000 => format!("{:.1} ms", us as f64 / 1e3),
        100_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => format!("{:.2} s", us as f64 / 1e6),
    }
}

/// Formats bytes: `3.4 MiB`.
pub fn bytes(count: u64) -> String {
    match count {
        0..1024 => format!("{count} B"),
        1024..0x10_0000 => format!("{:.1} KiB", count as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", count as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", count as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn an_error_for_want_of_descriptors_names_the_limit() {
        let named = |errno| chain(&io::Error::from_raw_os_error(errno)).contains("(RLIMIT_NOFILE)");
        assert_eq!(
            [Errno::MFILE, Errno::NFILE, Errno::NOENT].map(|errno| named(errno.raw_os_error())),
            [true, false, false]
        );
    }

    #[test]
    fn an_object_store_without_credentials_names_the_variables() {
        let message = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 7.8ms";
        assert!(chain(&io::Error::other(message)).contains("AWS_ACCESS_KEY_ID"));
        assert!(!chain(&io::Error::other("Generic S3 error: Access denied")).contains("AWS_ACCESS_KEY_ID"));
    }

    #[test]
    fn bytes_have_the_unit_that_fits() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3500), "3.4 KiB");
        assert_eq!(bytes(46 << 20), "46.0 MiB");
        assert_eq!(bytes(5 << 29), "2.50 GiB");
    }

    #[test]
    fn durations_have_the_unit_that_fits() {
        assert_eq!(duration(999), "999 µs");
        assert_eq!(duration(3_420), "3.4 ms");
        assert_eq!(duration(123_456), "123 ms");
        assert_eq!(duration(61_200_000), "61.20 s");
    }
}
