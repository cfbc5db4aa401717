//! Why a log is not used.

use std::io;
use std::path::PathBuf;
use uuid::Uuid;

/// See [the module](self).
#[derive(Debug, thiserror::Error)]
pub enum RedoError {
    /// The system refuses.
    #[error("redo log {}: {doing}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// What was done.
        doing: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Neither slot of its state is whole, and there are segments.
    #[error(
        "redo log {}: its state is damaged, so it is not known what of it belongs to the disk; the image alone is an older \
         disk. Keep both, and restore them from a copy", path.display()
    )]
    Damaged {
        /// The directory.
        path: PathBuf,
    },
    /// The segment of a sealed epoch is not what it was when it was sealed.
    #[error(
        "redo log {}: {name}, the segment of sealed epoch {epoch}, is damaged: {what}. Without it the disk would have older \
         data, so it is not used, and nothing was changed. Check the device under the log, then restore image and redo log \
         from a backup, or restore the VM from a checkpoint that was made before epoch {epoch}", path.display()
    )]
    Lost {
        /// The directory.
        path: PathBuf,
        /// The segment's file.
        name: String,
        /// Its epoch.
        epoch: u64,
        /// What is missing, and where.
        what: String,
    },
    /// Its directory has something else.
    #[error(
        "redo log {}{}: it has {name}, which is not a file of a redo log, so nothing in it was changed. Use an empty or a \
         new directory (--redo DIR, or `redo = \"FOLDER\"` in the [[disk]]), or move {name} away",
        path.display(), leads_to(target.as_deref())
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Where it leads, if it is a symbolic link.
        target: Option<PathBuf>,
        /// The first entry that is not a log's.
        name: String,
    },
    /// Its directory has another log.
    #[error(
        "redo log {}: its directory has the redo log of disk {found}, with writes that are not in that disk's image. Use \
         another directory (--redo DIR), or merge that log into its image first: rekindle disk merge IMAGE --redo DIR",
        path.display()
    )]
    Occupied {
        /// The directory.
        path: PathBuf,
        /// The other disk.
        found: Uuid,
    },
    /// Its directory is in use.
    #[error(
        "redo log {}: another disk server or merge uses this directory. Each disk needs a directory of its own; if it is \
         this disk's, end that server or merge first", path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The server has released it.
    #[error("the disk has no redo log any more: it has ended, or the server ends")]
    Closed,
    /// It is of a newer format.
    #[error("redo log {}: it is of format {found}, this Rekindle knows {}: use a newer one", path.display(), super::slot::FORMAT)]
    Newer {
        /// The directory.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// It is the log of a longer disk.
    #[error("redo log {}: it has writes up to byte {end}, and the image is {bytes} bytes long: it is not this image's", path.display())]
    Shorter {
        /// The directory.
        path: PathBuf,
        /// Where its writes end.
        end: u64,
        /// The image's length.
        bytes: u64,
    },
    /// It is the log of an image with another name.
    #[error(
        "redo log {}: it is the log of image {found}, not of {image}, so it was not used. Name the image and the log that belong \
         together (IMAGE.redo, or --redo DIR). If {found} was renamed to {image}: rekindle disk merge or rekindle disk serve \
         with --image-renamed-from {found}", path.display()
    )]
    OtherImage {
        /// The directory.
        path: PathBuf,
        /// File name of the image that it belongs to.
        found: String,
        /// File name of the image that it was opened for.
        image: String,
    },
    /// An epoch is wanted of a disk without a log.
    #[error(
        "redo log {}: there is none, so the disk is newer than the checkpoint (epoch {epoch} of disk {disk}): its log was \
         merged. Start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    NoLog {
        /// The directory.
        path: PathBuf,
        /// The epoch.
        epoch: u64,
        /// The disk.
        disk: Uuid,
    },
    /// It is another disk.
    #[error(
        "redo log {}: it is of disk {found}, the checkpoint is of disk {wanted}: another VM's, or its log was merged \
         since and the disk is newer. Start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    OtherDisk {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        found: Uuid,
        /// Whose it should be.
        wanted: Uuid,
    },
    /// The image has later writes.
    #[error(
        "redo log {}: the disk is newer than the checkpoint: it wants epoch {epoch}, and writes up to epoch {floor} were \
         merged. Use a newer checkpoint, or start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    NewerDisk {
        /// The directory.
        path: PathBuf,
        /// The epoch.
        epoch: u64,
        /// What the image may hold.
        floor: u64,
    },
    /// It never became durable as a whole.
    #[error("redo log {}: epoch {epoch} was never sealed (the newest is {sealed}): no committed checkpoint has it", path.display())]
    NotSealed {
        /// The directory.
        path: PathBuf,
        /// The epoch.
        epoch: u64,
        /// The newest that is.
        sealed: u64,
    },
    /// The guest went on from an older checkpoint.
    #[error(
        "redo log {}: epoch {epoch} was given up when the guest went on from an older checkpoint. Use a checkpoint made \
         since, or start the VM from the newest disk (rekindle run --newest-disk)", path.display()
    )]
    GivenUp {
        /// The directory.
        path: PathBuf,
        /// The epoch.
        epoch: u64,
    },
    /// It cannot be served without being written.
    #[error(
        "redo log {}: the disk has one, and is to be served read-only; merge it first: rekindle disk merge IMAGE",
        path.display()
    )]
    ReadOnly {
        /// The directory.
        path: PathBuf,
    },
}

fn leads_to(target: Option<&std::path::Path>) -> String {
    target.map_or(String::new(), |target| format!(" (a symbolic link to {})", target.display()))
}

impl RedoError {
    /// For `map_err`.
    pub(crate) fn io(path: &std::path::Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, doing, source }
    }
}

/// An error with its causes, in one line.
#[must_use]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}
