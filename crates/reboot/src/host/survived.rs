//! Checks that a guest's RAM is unchanged since the guest was suspended.
//!
//! A guest must never run with changed RAM. RAM is trusted for one of three reasons only; `docs/host-reboot.md` has the
//! argument.

use super::record::{FileDigest, RecordHeader, SuspendedGuest, read_token};
use rekindle_memory::digest;
use std::fs;
use std::io;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Kernel parameter that holds the token of the record for which this kernel was booted.
pub(super) const PARAMETER: &str = "rekindle.token=";
/// Magic number of a file of digests.
const MAGIC: &[u8; 8] = b"rkpages1";

/// Returns the boot ID of the running kernel.
pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Returns the command line of the running kernel.
pub(super) fn command_line() -> io::Result<String> {
    fs::read_to_string("/proc/cmdline")
}

/// Reason why RAM may be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    /// The guest was suspended under this kernel.
    SameBoot,
    /// This kernel was entered by the kexec that the record was made for.
    Kexec,
    /// None of the other reasons applies: the RAM may be trusted only if its digests match.
    Digests,
}

impl Trust {
    /// Returns the reason for which this host's RAM may be trusted for a record.
    ///
    /// # Errors
    /// Errors of reading the boot ID and the command line in `/proc`.
    pub(super) fn of(head: &RecordHeader) -> io::Result<Self> {
        Ok(Self::judge(head, &boot_id()?, &command_line()?))
    }

    fn judge(head: &RecordHeader, boot_id: &str, command_line: &str) -> Self {
        let entered = || command_line.split_whitespace().any(|word| word.strip_prefix(PARAMETER) == Some(&*head.token));
        if head.boot_id == boot_id {
            Self::SameBoot
        } else if entered() {
            Self::Kexec
        } else {
            Self::Digests
        }
    }
}

/// Checks that the RAM of `entry` is unchanged.
///
/// # Errors
/// A text that names the difference.
pub(super) fn check(entry: &SuspendedGuest, trust: Trust) -> Result<(), String> {
    let ram = &entry.state.hardware.ram;
    let named = |e: io::Error| format!("{}: {e}", ram.path.display());
    let bytes = fs::metadata(&ram.path).map_err(named)?.len();
    if bytes != ram.bytes {
        return Err(format!("{} has {bytes} bytes, not {}", ram.path.display(), ram.bytes));
    }
    if read_token(&entry.state).as_deref() != Some(&entry.token) {
        return Err(format!("{} is not the RAM of this record", ram.path.display()));
    }
    if trust != Trust::Digests {
        return Ok(());
    }
    let Some(digest_file) = &entry.pages else { return Err("its pages have no digests".into()) };
    let before = read_pages(digest_file).map_err(|e| format!("{}: {e}", digest_file.path.display()))?;
    let now = digest::file_pages(&ram.path).map_err(named)?;
    let changed = before.iter().zip(&now).filter(|(before, now)| before != now).count();
    match before.len() == now.len() && changed == 0 {
        true => Ok(()),
        false => Err(format!("{changed} of {} pages of {} have changed", now.len(), ram.path.display())),
    }
}

/// Writes digests of pages durably. Returns the length and digest of the file.
///
/// # Errors
/// Errors of writing the file.
pub(super) fn write_pages(path: &Path, pages: &[u64]) -> io::Result<FileDigest> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(pages.iter().flat_map(|page| page.to_le_bytes()));
    rekindle_vm::rundir::write_atomically(path, &bytes)?;
    Ok(FileDigest { path: path.to_owned(), bytes: bytes.len() as u64, digest: xxh3_64(&bytes) })
}

fn read_pages(digest_file: &FileDigest) -> io::Result<Vec<u64>> {
    let bytes = fs::read(&digest_file.path)?;
    let body = bytes.strip_prefix(MAGIC).map(<[u8]>::as_chunks::<8>);
    match body {
        Some((pages, [])) if bytes.len() as u64 == digest_file.bytes && xxh3_64(&bytes) == digest_file.digest => {
            Ok(pages.iter().map(|page| u64::from_le_bytes(*page)).collect())
        }
        _ => Err(io::Error::other("its content is not what was written")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_boot_or_this_token_is_trusted() {
        let head = RecordHeader { format: 1, token: "abc".into(), boot_id: "one".into(), committed_us: 0 };
        assert_eq!(Trust::judge(&head, "one", "quiet"), Trust::SameBoot);
        assert_eq!(Trust::judge(&head, "two", "quiet rekindle.token=abc panic=1\n"), Trust::Kexec);
        for line in ["quiet", "rekindle.token=abcd", "rekindle.token=", "x.rekindle.token=abc"] {
            assert_eq!(Trust::judge(&head, "two", line), Trust::Digests, "{line}");
        }
    }

    #[test]
    fn digests_are_read_back_complete_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.pages");
        let digest_file = write_pages(&path, &[1, 0, u64::MAX]).unwrap();
        assert_eq!(read_pages(&digest_file).unwrap(), [1, 0, u64::MAX]);
        let good = fs::read(&path).unwrap();
        for bad in [&good[..24], &good[..8], b"", &[&good[..], &[0]].concat()] {
            fs::write(&path, bad).unwrap();
            assert!(read_pages(&digest_file).is_err(), "{} bytes", bad.len());
        }
        let mut bad = good;
        bad[12] ^= 1;
        fs::write(&path, bad).unwrap();
        assert!(read_pages(&digest_file).is_err());
    }
}
