//! The file to which samples are appended. It always ends with a complete line.

use super::Sample;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Why the sample file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SampleFileError {
    /// Another process writes to the file.
    #[error("{path}: another `rekindle monitor` writes to it; give this one a file of its own")]
    Taken {
        /// Path of the file.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// A file of samples, one JSON object a line, locked for this writer.
#[derive(Debug)]
pub struct SampleFile {
    path: PathBuf,
    file: File,
    length: u64,
}

impl SampleFile {
    /// Opens the file, or makes it. An incomplete line at its end, left by a writer that was killed, is removed.
    ///
    /// # Errors
    /// [`SampleFileError`], also when another process writes to the file.
    pub fn open(path: &Path) -> Result<Self, SampleFileError> {
        let failed = |source| SampleFileError::Io { path: path.into(), source };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(SampleFileError::Taken { path: path.into() }),
            other => other.map_err(|e| failed(e.into()))?,
        }
        let length = whole(&file).map_err(failed)?;
        file.set_len(length).map_err(failed)?;
        Ok(Self { path: path.into(), file, length })
    }

    /// Appends samples and syncs the file: all of them are written, or none.
    ///
    /// # Errors
    /// [`SampleFileError::Io`], for example when the disk is full.
    pub fn append(&mut self, samples: &[Sample]) -> Result<(), SampleFileError> {
        self.try_append(samples).map_err(|source| {
            // The disk may be full: remove what was written, so that the file ends with a complete line.
            let _ = self.file.set_len(self.length);
            SampleFileError::Io { path: self.path.clone(), source }
        })
    }

    fn try_append(&mut self, samples: &[Sample]) -> io::Result<()> {
        let mut lines = Vec::new();
        for sample in samples {
            serde_json::to_writer(&mut lines, sample)?;
            lines.push(b'\n');
        }
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.write_all(&lines)?;
        self.file.sync_data()?;
        self.length += lines.len() as u64;
        Ok(())
    }
}

/// Returns the offset of the end of the last complete line.
fn whole(file: &File) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    let mut piece = [0; 4096];
    while end > 0 {
        let first = end.saturating_sub(piece.len() as u64);
        let piece = &mut piece[..(end - first) as usize];
        file.read_exact_at(piece, first)?;
        if let Some(at) = piece.iter().rposition(|byte| *byte == b'\n') {
            return Ok(first + at as u64 + 1);
        }
        end = first;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::super::Sampler;
    use super::*;
    use std::fs;

    #[test]
    fn a_piece_of_a_line_is_taken_off_and_what_is_whole_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("samples");
        let long = "x".repeat(9000);
        for (before, kept) in
            [("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("b", ""), (&*format!("a\n{long}"), "a\n")]
        {
            fs::write(&path, before).unwrap();
            let mut file = SampleFile::open(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), kept);
            assert!(matches!(SampleFile::open(&path), Err(SampleFileError::Taken { .. })), "two writers");
            let sample = Sampler::new().unwrap().host().unwrap();
            file.append(&[sample.clone(), sample.clone()]).unwrap();
            file.append(&[sample]).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.strip_prefix(kept).unwrap().lines().collect();
            assert_eq!(lines.len(), 3);
            assert!(lines.iter().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
        }
    }

    #[test]
    fn a_full_disk_is_reported_and_leaves_whole_lines() {
        let sample = Sampler::new().unwrap().host().unwrap();
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut full = SampleFile { path, file, length: 0 };
        let error = full.append(&[sample]).unwrap_err();
        assert!(error.to_string().contains("/dev/full"), "{error}");
        assert_eq!(full.length, 0);
    }
}
