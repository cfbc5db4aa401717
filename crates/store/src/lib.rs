//! Stores of VM checkpoints. A checkpoint is written as a whole and read back page by page (HydraVM, HPL-2011-24,
//! sections III-A and IV).
//!
//! | module | purpose |
//! |---|---|
//! | [`writer`] | write checkpoints, as the owner of a store |
//! | [`reader`] | read a checkpoint; [`image`] reads one in a directory |
//! | [`admin`] | list, verify, compact and fence a store |
//! | [`url`] | address of a store |
//! | [`export`] | convert a checkpoint to a migration stream that QEMU loads, and back |
//! | [`types`] | VMs, RAM blocks, owners, checkpoints |
//! | [`error`] | all errors |
//! | [`disk`] | file operations |
//! | [`remote`] | stores on a server |
//! | [`fuzz`] | all parsers, for fuzzing |
//! | [`format`] | formats of the files: `docs/store-format.md` |

#![allow(missing_docs, reason = "a name that needs no explanation gets no comment")]

pub mod admin;
pub mod disk;
mod engine;
pub mod error;
pub mod export;
pub mod format;
pub mod fuzz;
mod home;
pub mod image;
mod index;
pub mod listing;
pub mod log;
pub mod reader;
pub mod remote;
mod segments;
mod sparse;
#[cfg(test)]
mod tests;
pub mod types;
pub mod url;
pub mod verify;
pub mod writer;

pub use error::{Result, StoreError};
pub use reader::{Image, ReadOptions};
pub use url::StoreUrl;
pub use writer::{Checkpoint, Options, Writer};
