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
    InUse {
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
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(SampleFileError::InUse { path: path.into() }),
            locked => locked.map_err(|e| failed(e.into()))?,
        }
        let length = complete_length(&file).map_err(failed)?;
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
fn complete_length(file: &File) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    let mut buffer = [0; 4096];
    while end > 0 {
        let start = end.saturating_sub(buffer.len() as u64);
        let bytes = &mut buffer[..(end - start) as usize];
        file.read_exact_at(bytes, start)?;
        if let Some(newline) = bytes.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + newline as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::super::Sampler;
    use super::*;
    use std::fs;

    #[test]
    fn an_incomplete_line_is_removed_and_complete_lines_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("samples");
        let long_line = "x".repeat(9000);
        for (content, kept) in
            [("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("b", ""), (&*format!("a\n{long_line}"), "a\n")]
        {
            fs::write(&path, content).unwrap();
            let mut file = SampleFile::open(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), kept);
            assert!(matches!(SampleFile::open(&path), Err(SampleFileError::InUse { .. })), "two writers");
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
