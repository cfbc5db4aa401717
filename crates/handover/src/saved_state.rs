//! A suspended guest's state in a file. The file is valid only if the journal names it with its length and, for a
//! stream without RAM, its digest.

use crate::HandoverError;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stream;
use rekindle_qemu::transfer::save_to_file;
use rekindle_vm::journal::SavedState;
use rekindle_vm::rundir::RunDir;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Name of the *stream file* of a warm replacement. It holds the guest's whole state except main RAM.
const STREAM_FILE: &str = "handover.stream";

/// Time limit for writing the guest's RAM to a disk, or for reading it back.
pub const DISK_TIMEOUT: Duration = Duration::from_secs(3600);

/// Writes the stream of device state and small RAM blocks to a file, part by part: the parts that are sent to the
/// destination in advance are in the file before the guest is stopped.
pub struct StreamWriter {
    path: PathBuf,
    file: File,
    bytes: u64,
    digest: Xxh3,
}

impl std::fmt::Debug for StreamWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamWriter").field("path", &self.path).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl StreamWriter {
    /// Creates the stream file of a warm replacement in the run directory.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the file cannot be created.
    pub fn begin(rundir: &RunDir) -> Result<Self, HandoverError> {
        Self::create(rundir.file(STREAM_FILE))
    }

    /// Creates the stream file at `path`.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the file cannot be created.
    pub fn create(path: PathBuf) -> Result<Self, HandoverError> {
        let file = create_private(&path)?;
        Ok(Self { path, file, bytes: 0, digest: Xxh3::new() })
    }

    /// Appends a part of the stream.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the file cannot be written.
    pub fn write(&mut self, part: &[u8]) -> Result<(), HandoverError> {
        self.digest.update(part);
        self.bytes += part.len() as u64;
        self.file.write_all(part).map_err(|source| HandoverError::File { path: self.path.clone(), source })
    }

    /// Makes the complete stream durable.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the file cannot be made durable.
    pub fn finish(self) -> Result<SavedState, HandoverError> {
        self.file.sync_data().map_err(|source| HandoverError::File { path: self.path.clone(), source })?;
        Ok(SavedState { path: self.path, bytes: self.bytes, digest: self.digest.digest(), without_ram: true })
    }
}

/// Removes the stream file of a warm replacement.
pub fn remove_stream(rundir: &RunDir) {
    let _ = fs::remove_file(rundir.file(STREAM_FILE));
}

/// Reads a stream file and checks its length, its digest and its format.
///
/// # Errors
/// [`HandoverError::Damaged`]: the file cannot be read, is incomplete or has changed.
pub fn read_stream(name: &str, saved: &SavedState) -> Result<Vec<u8>, HandoverError> {
    let damaged = |what: String| HandoverError::Damaged { name: name.into(), path: saved.path.clone(), what };
    let stream = fs::read(&saved.path).map_err(|e| damaged(e.to_string()))?;
    if stream.len() as u64 != saved.bytes {
        return Err(damaged(wrong_length(stream.len() as u64, saved)));
    }
    if xxh3_64(&stream) != saved.digest {
        return Err(damaged("its digest is wrong".into()));
    }
    stream::check(&stream).map_err(|e| damaged(e.to_string()))?;
    Ok(stream)
}

/// Writes the RAM and device state of a stopped guest durably to `path`.
///
/// # Errors
/// [`HandoverError::Transfer`]: QEMU cannot save the state. [`HandoverError::File`]: the file cannot be created or
/// written.
pub fn save_with_ram(qmp: &mut Qmp, path: &Path) -> Result<SavedState, HandoverError> {
    let failed = |source: io::Error| HandoverError::File { path: path.to_owned(), source };
    let file = create_private(path)?;
    save_to_file(qmp, &file, DISK_TIMEOUT)?;
    file.sync_all().map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    Ok(SavedState { path: path.to_owned(), bytes, digest: 0, without_ram: false })
}

/// Opens a saved state that holds the guest's RAM.
///
/// # Errors
/// [`HandoverError::Damaged`]: the file cannot be read, or its length differs from the recorded length.
pub fn open_with_ram(name: &str, saved: &SavedState) -> Result<File, HandoverError> {
    let damaged = |what: String| HandoverError::Damaged { name: name.into(), path: saved.path.clone(), what };
    let file = File::open(&saved.path).map_err(|e| damaged(e.to_string()))?;
    let bytes = file.metadata().map_err(|e| damaged(e.to_string()))?.len();
    if bytes == saved.bytes { Ok(file) } else { Err(damaged(wrong_length(bytes, saved))) }
}

fn wrong_length(bytes: u64, saved: &SavedState) -> String {
    format!("it has {bytes} bytes instead of {}", saved.bytes)
}

/// Creates or empties a file that only root may read: it holds the guest's secrets.
fn create_private(path: &Path) -> Result<File, HandoverError> {
    let created = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    created.map_err(|source| HandoverError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_stream(content: &[u8]) -> (tempfile::TempDir, SavedState) {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut writer = StreamWriter::begin(&rundir).unwrap();
        for part in content.chunks(5) {
            writer.write(part).unwrap();
        }
        let saved = writer.finish().unwrap();
        (root, saved)
    }

    #[test]
    fn a_stream_file_is_read_back_and_any_damage_is_an_error() {
        let mut content = stream::HEADER.to_vec();
        content.extend([4, 5, 6, 0]);
        let (_root, saved) = write_stream(&content);
        assert_eq!(read_stream("web", &saved).unwrap(), content);
        fs::write(&saved.path, &content[..10]).unwrap();
        assert!(read_stream("web", &saved).unwrap_err().to_string().contains("10 bytes instead of 12"));
        content[9] ^= 1;
        fs::write(&saved.path, &content).unwrap();
        assert!(read_stream("web", &saved).unwrap_err().to_string().contains("digest"));
        fs::remove_file(&saved.path).unwrap();
        assert!(read_stream("web", &saved).unwrap_err().to_string().contains("handover.stream"));
    }
}
