//! Fail-over images of VMs: written as checkpoints, read back page by page (HydraVM, HPL-2011-24, sections III-A and IV).
//!
//! | module | what it is for |
//! |---|---|
//! | [`writer`] | the owner of a store: begin, pages, commit |
//! | [`reader`] | a checkpoint opened for reading; [`image`] is one in a directory |
//! | [`admin`] | what an administrator does: list, verify, compact, fence |
//! | [`url`] | where a store is |
//! | [`export`] | a checkpoint as a stream that QEMU loads, and back |
//! | [`types`] | what a store is about |
//! | [`error`] | what can go wrong, each by its own name |
//! | [`disk`] | all that is done with files |
//! | [`remote`] | stores on a server |
//! | [`fuzz`] | every parser, for fuzzing |
//! | [`format`] | what is in the files: `docs/store-format.md` |

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
pub use reader::{Image, Which};
pub use url::StoreUrl;
pub use writer::{Checkpoint, Options, Writer};
