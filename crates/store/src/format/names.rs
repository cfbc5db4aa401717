//! Names of a store's files.

pub const SUPERBLOCK: &str = "rekindle-store";
/// File in place of the superblock in a store that no VM has used.
pub const UNUSED: &str = "rekindle-store-unused";
/// Empty file of a store in an object store, with which the conditional requests of the server are checked; and start of the name of
/// another one, which exists during a check.
pub const EXCLUSIVE: &str = "rekindle-exclusive";
/// Directory of log entries.
pub const LOG: &str = "log";
/// Directory of segments.
pub const SEGMENTS: &str = "segments";
/// Directory of base indices.
pub const INDEX: &str = "index";
/// Prefix of the names of files that are being written.
pub const NEW: &str = "new-";

/// Returns the name of the log entry with number `log_number`.
#[must_use]
pub fn entry(log_number: u64) -> String {
    format!("{LOG}/{log_number:012}")
}

/// Returns the number of the log entry in the file `name` of the directory [`LOG`].
#[must_use]
pub fn parse_entry(name: &str) -> Option<u64> {
    let log_number = name.parse().ok()?;
    (format!("{log_number:012}") == name).then_some(log_number)
}

/// Returns the name of the segment `number` of epoch `epoch`.
#[must_use]
pub fn segment(epoch: u64, number: u64) -> String {
    format!("{SEGMENTS}/{epoch:08}-{number:016}")
}

/// Returns epoch and number of the segment in the file `name` of the directory [`SEGMENTS`].
#[must_use]
pub fn parse_segment(name: &str) -> Option<(u64, u64)> {
    let (epoch, number) = name.split_once('-')?;
    let (epoch, number) = (epoch.parse().ok()?, number.parse().ok()?);
    (segment(epoch, number).strip_prefix(SEGMENTS)?.strip_prefix('/')? == name).then_some((epoch, number))
}

/// Returns the name of the base index that the owner of epoch `epoch` wrote after log entry `log_number`.
#[must_use]
pub fn base(log_number: u64, epoch: u64) -> String {
    format!("{INDEX}/{log_number:012}-{epoch:08}")
}

/// Returns log entry and epoch of the base index in the file `name` of the directory [`INDEX`].
#[must_use]
pub fn parse_base(name: &str) -> Option<(u64, u64)> {
    let (log_number, epoch) = name.split_once('-')?;
    let (log_number, epoch) = (log_number.parse().ok()?, epoch.parse().ok()?);
    (base(log_number, epoch).strip_prefix(INDEX)?.strip_prefix('/')? == name).then_some((log_number, epoch))
}

/// Returns the second name of the newest log entry, by which a reader notices that the first name is missing.
#[must_use]
pub fn last(log_number: u64) -> String {
    format!("{LOG}/last-{log_number:012}")
}

/// Returns the number of the log entry whose second name is the file `name` of the directory [`LOG`].
#[must_use]
pub fn parse_last(name: &str) -> Option<u64> {
    parse_entry(name.strip_prefix("last-")?)
}

/// Returns the name of a file in `directory` that the owner of epoch `epoch` is writing. `unique` is part of no other
/// such name.
#[must_use]
pub fn new(directory: &str, epoch: u64, unique: &str) -> String {
    format!("{directory}/{NEW}{epoch:08}-{unique}")
}

/// Returns the epoch of the owner that is writing the file `name`.
#[must_use]
pub fn parse_new(name: &str) -> Option<u64> {
    name.strip_prefix(NEW)?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_not() {
        let file_name = |path: String| path.rsplit('/').next().unwrap().to_owned();
        assert_eq!(parse_entry(&file_name(entry(42))), Some(42));
        assert_eq!(parse_entry("42"), None);
        assert_eq!(parse_entry(&file_name(entry(10u64.pow(15)))), Some(10u64.pow(15)));
        assert_eq!(parse_segment(&file_name(segment(7, 123))), Some((7, 123)));
        assert_eq!(parse_segment("7-123"), None);
        assert_eq!(parse_segment("00000007-+000000000000123"), None);
        assert_eq!(parse_base(&file_name(base(40, 7))), Some((40, 7)));
        assert_eq!(parse_new(&file_name(new(LOG, 7, "x"))), Some(7));
        assert_eq!(parse_new("other"), None);
    }
}
