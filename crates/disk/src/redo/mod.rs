//! The redo log of a protected VM's disk: epochs that can be gone back to (`docs/disk-epochs.md`).
//!
//! | module | what it is for |
//! |---|---|
//! | [`format`] | heads, headers, checksums |
//! | [`files`] | the directory and its files |
//! | [`slot`] | what is durable about the epochs |
//! | [`state`] | the directory's files: recording that state, making and removing segments |
//! | [`index`] | where each sector is |
//! | [`log`] | places for writes, marks, what is durable, what is to be merged |
//! | [`recover`] | opening a log |
//! | [`merge`] | epochs into the image |
//! | [`keeper`] | what a server is asked about epochs |
//! | [`left`] | the log of a disk that nobody serves |

pub mod error;
pub mod files;
pub mod format;
pub mod index;
pub mod keeper;
pub mod left;
pub mod log;
pub mod merge;
pub mod recover;
pub mod slot;
pub mod state;
#[cfg(test)]
mod tests;
