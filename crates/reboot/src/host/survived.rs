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
pub(super) const TOKEN_PARAMETER: &str = "rekindle.token=";
/// File that holds the boot ID of the running kernel.
pub(super) const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// First bytes of a file of page digests.
const DIGEST_FILE_MAGIC: &[u8; 8] = b"rkpages1";

/// Returns the boot ID of the running kernel.
pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID_FILE)?.trim().to_owned())
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
    pub(super) fn of(header: &RecordHeader) -> io::Result<Self> {
        Ok(Self::judge(header, &boot_id()?, &command_line()?))
    }

    fn judge(header: &RecordHeader, boot_id: &str, command_line: &str) -> Self {
        let is_token = |word: &str| word.strip_prefix(TOKEN_PARAMETER) == Some(&*header.token);
        if header.boot_id == boot_id {
            Self::SameBoot
        } else if command_line.split_whitespace().any(is_token) {
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
pub(super) fn check_ram(entry: &SuspendedGuest, trust: Trust) -> Result<(), String> {
    let ram = &entry.state.hardware.ram;
    let unreadable = |e: io::Error| format!("{}: {e}", ram.path.display());
    let bytes = fs::metadata(&ram.path).map_err(unreadable)?.len();
    if bytes != ram.bytes {
        return Err(format!("{} has {bytes} bytes, not {}", ram.path.display(), ram.bytes));
    }
    if read_token(&entry.state).as_deref() != Some(&entry.token) {
        return Err(format!("{} is not the RAM of this record", ram.path.display()));
    }
    if trust != Trust::Digests {
        return Ok(());
    }
    let Some(digest_file) = &entry.page_digests else { return Err("its pages have no digests".into()) };
    let saved_digests = read_page_digests(digest_file).map_err(|e| format!("{}: {e}", digest_file.path.display()))?;
    let digests = digest::file_pages(&ram.path).map_err(unreadable)?;
    let changed = saved_digests.iter().zip(&digests).filter(|(saved, current)| saved != current).count();
    if saved_digests.len() == digests.len() && changed == 0 {
        return Ok(());
    }
    Err(format!("{changed} of {} pages of {} have changed", digests.len(), ram.path.display()))
}

/// Writes digests of pages durably. Returns the length and digest of the file.
///
/// # Errors
/// Errors of writing the file.
pub(super) fn write_page_digests(path: &Path, digests: &[u64]) -> io::Result<FileDigest> {
    let mut bytes = DIGEST_FILE_MAGIC.to_vec();
    bytes.extend(digests.iter().flat_map(|digest| digest.to_le_bytes()));
    rekindle_vm::rundir::write_atomically(path, &bytes)?;
    Ok(FileDigest { path: path.to_owned(), bytes: bytes.len() as u64, digest: xxh3_64(&bytes) })
}

fn read_page_digests(digest_file: &FileDigest) -> io::Result<Vec<u64>> {
    let bytes = fs::read(&digest_file.path)?;
    let is_unchanged = bytes.len() as u64 == digest_file.bytes && xxh3_64(&bytes) == digest_file.digest;
    match bytes.strip_prefix(DIGEST_FILE_MAGIC).map(<[u8]>::as_chunks::<8>) {
        Some((digests, [])) if is_unchanged => Ok(digests.iter().map(|digest| u64::from_le_bytes(*digest)).collect()),
        _ => Err(io::Error::other("its content is not what was written")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_boot_or_this_token_is_trusted() {
        let header = RecordHeader { format: 1, token: "abc".into(), boot_id: "one".into(), committed_us: 0 };
        assert_eq!(Trust::judge(&header, "one", "quiet"), Trust::SameBoot);
        assert_eq!(Trust::judge(&header, "two", "quiet rekindle.token=abc panic=1\n"), Trust::Kexec);
        for line in ["quiet", "rekindle.token=abcd", "rekindle.token=", "x.rekindle.token=abc"] {
            assert_eq!(Trust::judge(&header, "two", line), Trust::Digests, "{line}");
        }
    }

    #[test]
    fn digests_are_read_back_complete_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.pages");
        let digest_file = write_page_digests(&path, &[1, 0, u64::MAX]).unwrap();
        assert_eq!(read_page_digests(&digest_file).unwrap(), [1, 0, u64::MAX]);
        let written = fs::read(&path).unwrap();
        for bad in [&written[..24], &written[..8], b"", &[&written[..], &[0]].concat()] {
            fs::write(&path, bad).unwrap();
            assert!(read_page_digests(&digest_file).is_err(), "{} bytes", bad.len());
        }
        let mut with_flipped_bit = written;
        with_flipped_bit[12] ^= 1;
        fs::write(&path, with_flipped_bit).unwrap();
        assert!(read_page_digests(&digest_file).is_err());
    }
}
