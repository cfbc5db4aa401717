//! The state of a suspended guest as a file, and starting a QEMU from it.

use super::RebootError;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stream;
use rekindle_qemu::transfer::{Capabilities, Feed, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::disks;
use rekindle_vm::journal::SavedState;
use rekindle_vm::life::LifeError;
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
/// The file of a warm reboot: all of the guest but its main RAM.
const FILE: &str = "handover.stream";

/// What a QEMU that takes over by a stream without main RAM is set to. `x-ignore-shared`: the main RAM is there
/// already. `late-block-activate`: disk images, with their locks, are taken at the resume, when the old QEMU has let
/// go of them, and not at the end of the load.
pub(crate) const WARM: Capabilities<'static> =
    &[("events", true), ("x-ignore-shared", true), ("late-block-activate", true)];

/// Taps at the numbers that a QEMU's command line names.
pub(crate) type Taps = Vec<(OwnedFd, RawFd)>;

/// How long a load may take that has to read the guest's RAM from a disk.
pub(crate) const LOAD: Duration = Duration::from_secs(3600);

/// Keeps the stream of a warm reboot as it is written, part by part: what the new QEMU was sent ahead is in the file
/// before the guest is stopped.
pub(crate) struct Keeper {
    path: PathBuf,
    file: File,
    bytes: u64,
    digest: Xxh3,
}

impl Keeper {
    /// Begin. The file means nothing before the journal names it with its length and digest.
    pub(crate) fn begin(rundir: &RunDir) -> Result<Self, RebootError> {
        Self::at(rundir.file(FILE))
    }

    /// The same for a file of another place.
    pub(crate) fn at(path: PathBuf) -> Result<Self, RebootError> {
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = opened.map_err(|source| RebootError::File { path: path.clone(), source })?;
        Ok(Self { path, file, bytes: 0, digest: Xxh3::new() })
    }

    /// The next part.
    pub(crate) fn write(&mut self, part: &[u8]) -> Result<(), RebootError> {
        self.digest.update(part);
        self.bytes += part.len() as u64;
        self.file.write_all(part).map_err(|source| RebootError::File { path: self.path.clone(), source })
    }

    /// The stream is whole: make it last.
    pub(crate) fn finish(self) -> Result<SavedState, RebootError> {
        self.file.sync_data().map_err(|source| RebootError::File { path: self.path.clone(), source })?;
        Ok(SavedState { path: self.path, bytes: self.bytes, digest: self.digest.digest(), without_ram: true })
    }
}

/// Remove the stream of a warm reboot.
pub(crate) fn forget(rundir: &RunDir) {
    let _ = fs::remove_file(rundir.file(FILE));
}

/// Read a kept stream, whole and unchanged or not at all.
pub(crate) fn read(name: &str, saved: &SavedState) -> Result<Vec<u8>, RebootError> {
    let damaged = |what: String| RebootError::Damaged { name: name.into(), path: saved.path.clone(), what };
    let stream = fs::read(&saved.path).map_err(|e| damaged(e.to_string()))?;
    if stream.len() as u64 != saved.bytes {
        return Err(damaged(format!("it has {} bytes instead of {}", stream.len(), saved.bytes)));
    }
    if xxh3_64(&stream) != saved.digest {
        return Err(damaged("its digest is another one".into()));
    }
    stream::check(&stream).map_err(|e| damaged(e.to_string()))?;
    Ok(stream)
}

/// Start a QEMU, of a generation, from a kept stream; the RAM file must be in place. Nothing else may run the guest.
///
/// On success: the QEMU holds the guest, paused. `run` of the caller decides when it goes on.
pub(crate) fn start_from(
    rundir: &RunDir,
    hardware: &Hardware,
    binary: &Binary,
    (generation, saved): (u32, &SavedState),
    taps: Taps,
) -> Result<(Vmm, Qmp), RebootError> {
    let stream = read(rundir.name(), saved)?;
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    disks::start(rundir, hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(generation).map_err(file)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, binary.syntax);
    let vmm = Vmm::spawn(&binary.path, &arguments, &directory, taps)?;
    let load = || -> Result<Qmp, RebootError> {
        let mut qmp = vmm.connect(vmm::START)?;
        let mut feed = Feed::open(&mut qmp, WARM)?;
        feed.write(&stream)?;
        drop(feed);
        wait_loaded(&mut qmp, LOAD)?;
        Ok(qmp)
    };
    match load() {
        Ok(qmp) => Ok((vmm, qmp)),
        Err(source) => {
            let _ = vmm.kill();
            let said = log_tail(&vmm.directory(), 10);
            Err(RebootError::NewFailed {
                name: rundir.name().into(),
                doing: "load the saved state",
                said,
                source: Box::new(source),
            })
        }
    }
}

/// A time no file has by chance: given to the RAM file just before a new QEMU is let go.
const MARK: Timespec = Timespec { tv_sec: 1_000_000_000, tv_nsec: 123_456_789 };

/// Mark the RAM file so that [`untouched`] can tell whether it was written to.
///
/// The kernel sets a file's modification time when a page of a shared mapping is first written through a fresh page
/// table, which is what a QEMU has that has not run its guest yet. Pages that the load of the device state has *read*
/// (virtio rings) are mapped writable with their neighbours, and a write to them alone is not seen; a guest that runs
/// writes to its stacks and per-processor data at once, which are elsewhere. Only tmpfs is known to do so: `None`
/// elsewhere, which means that nothing can be told.
pub(crate) fn mark(ram: &Path) -> Option<i128> {
    let tmpfs = statfs(ram).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
    let times = Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: MARK };
    (tmpfs && utimensat(CWD, ram, &times, AtFlags::empty()).is_ok())
        .then_some(i128::from(MARK.tv_sec) * 1_000_000_000 + i128::from(MARK.tv_nsec))
}

/// Whether the RAM file has not been written to since it was marked.
pub(crate) fn untouched(ram: &PathBuf, mark: Option<i128>) -> bool {
    mark.is_some() && fs::metadata(ram).ok().as_ref().map(modified) == mark
}

/// The modification times of the disk images that the guest can write. `None` if one of them is no regular file: a
/// block device has none that tells.
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

    fn kept(content: &[u8]) -> (tempfile::TempDir, SavedState) {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut keeper = Keeper::begin(&rundir).unwrap();
        for part in content.chunks(5) {
            keeper.write(part).unwrap();
        }
        let saved = keeper.finish().unwrap();
        (root, saved)
    }

    #[test]
    fn a_kept_state_is_read_and_any_damage_is_told() {
        let mut content = stream::HEADER.to_vec();
        content.extend([4, 5, 6, 0]);
        let (_root, saved) = kept(&content);
        assert_eq!(read("web", &saved).unwrap(), content);
        fs::write(&saved.path, &content[..10]).unwrap();
        assert!(read("web", &saved).unwrap_err().to_string().contains("10 bytes instead of 12"));
        content[9] ^= 1;
        fs::write(&saved.path, &content).unwrap();
        assert!(read("web", &saved).unwrap_err().to_string().contains("digest"));
        fs::remove_file(&saved.path).unwrap();
        assert!(read("web", &saved).unwrap_err().to_string().contains("handover.stream"));
    }

    #[test]
    fn a_write_to_a_marked_file_is_seen() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("web.ram");
        fs::write(&path, [0; 8192]).unwrap();
        let at = mark(&path);
        assert!(at.is_some() && untouched(&path, at));
        fs::write(&path, [1; 8192]).unwrap();
        assert!(!untouched(&path, at));
        assert!(!untouched(&path, None));
    }
}
