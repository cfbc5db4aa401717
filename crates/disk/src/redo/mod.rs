//! The redo log of a protected VM's disk, which can be opened as of an earlier epoch (`docs/disk-epochs.md`).
//!
//! | module | contents |
//! |---|---|
//! | [`format`] | names of segments; segment heads, entry headers, checksums |
//! | [`files`] | the directory and its files |
//! | [`epoch_state`] | the durable state of the epochs |
//! | [`directory`] | the log's directory: records that state, creates and removes segments |
//! | [`index`] | where each sector is |
//! | [`log`] | allocates entries, ends epochs, tracks durable entries and entries to merge |
//! | [`recover`] | opens a log |
//! | [`merge`] | copies epochs into the image |
//! | [`offline`] | inspects and merges the log of a disk that has no server |
//!
//! A server uses the log through [`crate::engine`], for requests, and [`crate::keeper`], for epochs.

pub mod directory;
pub mod epoch_state;
pub mod error;
pub mod files;
pub mod format;
pub mod index;
pub mod log;
pub mod merge;
pub mod offline;
pub mod recover;
#[cfg(test)]
pub(crate) mod tests;
