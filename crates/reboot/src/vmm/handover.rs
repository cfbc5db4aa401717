//! The device state of a suspended guest as a file, and starting a destination QEMU from it.

use super::RebootError;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stream;
use rekindle_qemu::transfer::{Capabilities, Feed, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::journal::SavedState;
use rekindle_vm::rundir::RunDir;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, statfs, utimensat};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const TMPFS_MAGIC: u64 = 0x0102_1994;
/// The state file of a warm reboot: everything but main RAM.
const STREAM_FILE: &str = "handover.stream";

/// Migration capabilities of a destination QEMU that loads a stream without main RAM. `x-ignore-shared`: it maps main
/// RAM already. `late-block-activate`: it opens disk images and takes their locks when the guest resumes, after the
/// source QEMU has released them, and not at the end of the load.
pub(crate) const WARM_CAPABILITIES: Capabilities<'static> =
    &[("events", true), ("x-ignore-shared", true), ("late-block-activate", true)];

/// Open taps, with the descriptor numbers that a QEMU's command line names.
pub(crate) type Taps = Vec<(OwnedFd, RawFd)>;

/// How long a load may take that reads the guest's RAM from a disk.
pub(crate) const LOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Writes the stream of a warm reboot to a file, part by part: what is sent to the destination in advance is in the
/// file before the guest is stopped.
pub(crate) struct StreamWriter {
    path: PathBuf,
    file: File,
    bytes: u64,
    digest: Xxh3,
}

impl StreamWriter {
    /// Creates the file. It counts only when the journal names it with its length and digest.
    pub(crate) fn begin(rundir: &RunDir) -> Result<Self, RebootError> {
        Self::create(rundir.file(STREAM_FILE))
    }

    /// Creates the stream file at `path`.
    pub(crate) fn create(path: PathBuf) -> Result<Self, RebootError> {
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = opened.map_err(|source| RebootError::File { path: path.clone(), source })?;
        Ok(Self { path, file, bytes: 0, digest: Xxh3::new() })
    }

    pub(crate) fn write(&mut self, part: &[u8]) -> Result<(), RebootError> {
        self.digest.update(part);
        self.bytes += part.len() as u64;
        self.file.write_all(part).map_err(|source| RebootError::File { path: self.path.clone(), source })
    }

    /// Makes the complete stream durable.
    pub(crate) fn finish(self) -> Result<SavedState, RebootError> {
        self.file.sync_data().map_err(|source| RebootError::File { path: self.path.clone(), source })?;
        Ok(SavedState { path: self.path, bytes: self.bytes, digest: self.digest.digest(), without_ram: true })
    }
}

/// Removes the stream of a warm reboot.
pub(crate) fn remove_stream(rundir: &RunDir) {
    let _ = fs::remove_file(rundir.file(STREAM_FILE));
}

/// Reads a stream file. Returns an error unless it is complete and unchanged.
pub(crate) fn read_stream(name: &str, saved: &SavedState) -> Result<Vec<u8>, RebootError> {
    let damaged = |what: String| RebootError::Damaged { name: name.into(), path: saved.path.clone(), what };
    let stream = fs::read(&saved.path).map_err(|e| damaged(e.to_string()))?;
    if stream.len() as u64 != saved.bytes {
        return Err(damaged(format!("it has {} bytes instead of {}", stream.len(), saved.bytes)));
    }
    if xxh3_64(&stream) != saved.digest {
        return Err(damaged("its digest is wrong".into()));
    }
    stream::check(&stream).map_err(|e| damaged(e.to_string()))?;
    Ok(stream)
}

/// Starts a QEMU of a generation from a stream file. The RAM file must be in place, and nothing else may run the guest.
///
/// On success the QEMU holds the guest, paused. The caller resumes it.
pub(crate) fn start_from(
    rundir: &RunDir,
    hardware: &Hardware,
    binary: &Binary,
    (generation, saved): (u32, &SavedState),
    taps: Taps,
) -> Result<(Vmm, Qmp), RebootError> {
    let stream = read_stream(rundir.name(), saved)?;
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    disks::start(rundir, hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(generation).map_err(file)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, binary.syntax);
    let vmm = Vmm::spawn(&binary.path, &arguments, &directory, taps)?;
    let load = || -> Result<Qmp, RebootError> {
        let mut qmp = vmm.connect(vmm::START)?;
        let mut feed = Feed::open(&mut qmp, WARM_CAPABILITIES)?;
        feed.write(&stream)?;
        drop(feed);
        wait_loaded(&mut qmp, LOAD_TIMEOUT)?;
        Ok(qmp)
    };
    match load() {
        Ok(qmp) => Ok((vmm, qmp)),
        Err(source) => {
            let _ = vmm.kill();
            let log = log_tail(&vmm.directory(), 10);
            Err(RebootError::DestinationFailed {
                name: rundir.name().into(),
                doing: "load the saved state",
                log,
                source: Box::new(source),
            })
        }
    }
}

/// A modification time that no file has by chance: set on the RAM file just before a destination QEMU resumes the
/// guest.
const MARK_TIME: Timespec = Timespec { tv_sec: 1_000_000_000, tv_nsec: 123_456_789 };

/// Marks the RAM file so that [`is_untouched`] can detect later writes to it. Returns the mark.
///
/// The kernel sets a file's modification time when a page of a shared mapping is first written through a fresh page
/// table, and a QEMU that has not run its guest has a fresh one. Pages that the load of the device state has *read*
/// (virtio rings) are mapped writable together with their neighbours, so a write to those alone goes unnoticed; but a
/// guest that runs immediately writes to its stacks and per-processor data, which are elsewhere. Only tmpfs is known to
/// behave this way: on other file systems this returns `None`, and nothing can be concluded.
pub(crate) fn mark_ram(ram: &Path) -> Option<i128> {
    let tmpfs = statfs(ram).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
    let times = Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: MARK_TIME };
    (tmpfs && utimensat(CWD, ram, &times, AtFlags::empty()).is_ok())
        .then_some(i128::from(MARK_TIME.tv_sec) * 1_000_000_000 + i128::from(MARK_TIME.tv_nsec))
}

/// Returns whether the RAM file has not been written to since it was marked.
pub(crate) fn is_untouched(ram: &PathBuf, mark_ram: Option<i128>) -> bool {
    mark_ram.is_some() && fs::metadata(ram).ok().as_ref().map(modified) == mark_ram
}

/// Returns the modification times of the disk images that the guest can write. `None` if one of them is not a regular
/// file: the time of a block device does not show writes.
pub(crate) fn disk_times(hardware: &Hardware) -> Option<Vec<(PathBuf, i128)>> {
    let writable = hardware.disks.iter().filter(|disk| !disk.readonly);
    writable
        .map(|disk| {
            let metadata = fs::metadata(&disk.path).ok().filter(fs::Metadata::is_file)?;
            Some((disk.path.clone(), modified(&metadata)))
        })
        .collect()
}

fn modified(metadata: &fs::Metadata) -> i128 {
    i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
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

    #[test]
    fn a_write_to_a_marked_file_is_detected() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("web.ram");
        fs::write(&path, [0; 8192]).unwrap();
        let at = mark_ram(&path);
        assert!(at.is_some() && is_untouched(&path, at));
        fs::write(&path, [1; 8192]).unwrap();
        assert!(!is_untouched(&path, at));
        assert!(!is_untouched(&path, None));
    }
}
