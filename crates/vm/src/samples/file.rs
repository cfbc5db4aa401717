//! The file that samples are appended to: whole lines, whatever happens.

use super::Sample;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Why nothing more can be appended.
#[derive(Debug, thiserror::Error)]
pub enum SampleFileError {
    /// Another process does.
    #[error("{path}: another `rekindle monitor` writes to it; give this one a file of its own")]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// See [the module](self).
#[derive(Debug)]
pub struct SampleFile {
    path: PathBuf,
    file: File,
    length: u64,
}

impl SampleFile {
    /// Opens it, or makes it. A piece of a line at its end, of a writer that was killed, is taken off.
    ///
    /// # Errors
    /// [`SampleFileError`].
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

    /// Appends samples, and makes that last: all of them, or none.
    ///
    /// # Errors
    /// [`SampleFileError`].
    pub fn append(&mut self, samples: &[Sample]) -> Result<(), SampleFileError> {
        self.try_append(samples).map_err(|source| {
            // A full disk: what came of it is taken back, so that the last line is a whole one.
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

/// Where its last whole line ends.
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
