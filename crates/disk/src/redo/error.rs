//! Errors of a redo log.

use std::io;
use std::path::PathBuf;
use uuid::Uuid;

#[derive(Debug, thiserror::Error)]
pub enum RedoError {
    #[error("redo log {}: {doing}", path.display())]
    Io {
        path: PathBuf,
        /// The step that failed.
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// Neither slot of the state file is valid, and there are segments.
    #[error(
        "redo log {}: its state is damaged, so it is not known what of it belongs to the disk; the image alone is an older \
         disk. Keep both, and restore them from a copy", path.display()
    )]
    DamagedState { path: PathBuf },
    /// The segment of a sealed epoch is damaged or missing.
    #[error(
        "redo log {}: {name}, the segment of sealed epoch {epoch}, is damaged: {what}. Without it the disk would have older \
         data, so it is not used, and nothing was changed. Check the device under the log, then restore image and redo log \
         from a backup, or restore the VM from a checkpoint that was made before epoch {epoch}", path.display()
    )]
    DamagedSegment {
        path: PathBuf,
        name: String,
        epoch: u64,
        /// Description of the damaged or missing part, and its place.
        what: String,
    },
    /// The directory has files that no log created.
    #[error(
        "redo log {}{}: it has {name}, which is not a file of a redo log, so nothing in it was changed. Use an empty or a \
         new directory (--redo DIR, or `redo = \"FOLDER\"` in the [[disk]]), or move {name} elsewhere",
        path.display(), link_note(target.as_deref())
    )]
    ForeignFile {
        path: PathBuf,
        /// The target, if the directory is a symbolic link.
        target: Option<PathBuf>,
        /// The first entry that no log created.
        name: String,
    },
    /// The directory has the log of another disk.
    #[error(
        "redo log {}: its directory has the redo log of disk {found}, with writes that are not in that disk's image. Use \
         another directory (--redo DIR), or merge that log into its image first: rekindle disk merge IMAGE --redo DIR",
        path.display()
    )]
    Occupied { path: PathBuf, found: Uuid },
    /// Another process uses the directory.
    #[error(
        "redo log {}: another disk server or merge uses this directory. Each disk needs a directory of its own; if it is \
         this disk's, end that server or merge first", path.display()
    )]
    InUse { path: PathBuf },
    #[error("the disk no longer has a redo log: it was merged and removed, or the server is ending")]
    Closed,
    /// A newer version wrote the log.
    #[error("redo log {}: it has format {found}, and this Rekindle supports up to {}; use a newer Rekindle", path.display(), super::epoch_state::FORMAT)]
    NewerFormat { path: PathBuf, found: u32 },
    /// The log is of a disk that is longer than the image.
    #[error("redo log {}: it has writes up to byte {end}, but the image is {bytes} bytes long, so it belongs to another image", path.display())]
    ImageTooShort { path: PathBuf, end: u64, bytes: u64 },
    /// The log is of an image with another name.
    #[error(
        "redo log {}: it is the log of image {found}, not of {image}, so it was not used. Name the image and the log that belong \
         together (IMAGE.redo, or --redo DIR). If {found} was renamed to {image}: rekindle disk merge or rekindle disk serve \
         with --image-renamed-from {found}", path.display()
    )]
    OtherImage {
        path: PathBuf,
        /// File name of the image that the log belongs to.
        found: String,
        /// File name of the image that the log was opened for.
        image: String,
    },
    /// An epoch is required, but the disk has no log.
    #[error(
        "redo log {}: there is none, so the disk is newer than the checkpoint (epoch {epoch} of disk {disk}): its log was \
         merged. Start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    NoLog { path: PathBuf, epoch: u64, disk: Uuid },
    #[error(
        "redo log {}: it is of disk {found}, the checkpoint is of disk {wanted}: another VM's, or its log was merged \
         since and the disk is newer. Start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    OtherDisk { path: PathBuf, found: Uuid, wanted: Uuid },
    /// The image has writes that are newer than the required epoch.
    #[error(
        "redo log {}: the disk is newer than the checkpoint: it wants epoch {epoch}, and writes up to epoch {floor} were \
         merged. Use a newer checkpoint, or start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    NewerDisk {
        path: PathBuf,
        epoch: u64,
        /// The newest epoch that may have been merged.
        floor: u64,
    },
    #[error("redo log {}: epoch {epoch} was never sealed (the newest is {sealed}): no committed checkpoint has it", path.display())]
    NotSealed {
        path: PathBuf,
        epoch: u64,
        /// The newest sealed epoch.
        sealed: u64,
    },
    /// The guest resumed from an older checkpoint, which discarded the later epochs.
    #[error(
        "redo log {}: epoch {epoch} was discarded when the guest resumed from an older checkpoint. Use a checkpoint made \
         since, or start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    Discarded { path: PathBuf, epoch: u64 },
    #[error(
        "redo log {}: a disk with a redo log cannot be served read-only; merge the log first: rekindle disk merge IMAGE",
        path.display()
    )]
    ReadOnly { path: PathBuf },
}

/// Returns the note that a directory is a symbolic link, if it is one.
fn link_note(target: Option<&std::path::Path>) -> String {
    target.map_or(String::new(), |target| format!(" (a symbolic link to {})", target.display()))
}

impl RedoError {
    /// Returns a function for `map_err`. `doing` is the step that failed.
    pub(crate) fn io(path: &std::path::Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, doing, source }
    }
}

/// Returns an error with its causes, in one line.
#[must_use]
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
