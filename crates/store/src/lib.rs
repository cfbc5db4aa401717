//! Stores of VM checkpoints. A checkpoint is written as a whole and read back page by page (HydraVM, HPL-2011-24,
//! sections III-A and IV).
//!
//! Modules in layers. Each imports only from the layers below it, or from modules of its own line to its left:
//!
//! ```text
//! use a store            writer   reader   export   admin   fuzz
//! a store                engine   packing   fencing   listing   verify
//! a checkpoint in it     index   image
//! structures in it       directory   log   checkpoints   segments
//! where a store is       objects   location
//! base                   types   url   credentials   keys   format   sealing   disk   error   page_table
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`writer`] | write checkpoints, as the owner of a store |
//! | [`reader`] | read a checkpoint |
//! | [`admin`] | create, list, verify, compact and fence a store |
//! | [`export`] | convert a checkpoint to a migration stream that QEMU loads, and back |
//! | `engine` | the writer of a store |
//! | `packing` | build and compress frames of pages |
//! | `fencing`, [`listing`], [`verify`] | the operations of [`admin`] |
//! | [`image`], `index` | read a checkpoint: its pages, and where they are |
//! | `checkpoints` | find checkpoints in the log |
//! | `segments` | read segments, which contain the pages |
//! | [`log`] | the log: claim a store, commit, find the newest state |
//! | `directory` | open and create the directory of a store |
//! | `page_table` | tables with a value for every page |
//! | `location` | a store's disk, by its address |
//! | [`objects`] | file operations in an object store |
//! | [`disk`] | file operations |
//! | [`sealing`] | encrypt and authenticate files |
//! | [`keys`], [`credentials`] | the keys of an owner, and what else a command needs to reach a store |
//! | [`format`] | formats of the files: `docs/store-format.md` |
//! | [`error`] | all errors |
//! | [`types`], [`url`] | VMs, RAM blocks, owners, checkpoints; address of a store |
//! | [`fuzz`] | all parsers, for fuzzing |

#![allow(missing_docs, reason = "a name that needs no explanation gets no comment")]

pub mod admin;
mod checkpoints;
pub mod credentials;
mod directory;
pub mod disk;
mod engine;
pub mod environment_file;
pub mod error;
pub mod export;
mod fencing;
pub mod format;
pub mod fuzz;
pub mod image;
mod index;
pub mod keys;
pub mod listing;
pub mod location;
pub mod log;
pub mod objects;
mod packing;
mod page_table;
pub mod reader;
pub mod sealing;
mod segments;
#[cfg(test)]
mod tests;
pub mod types;
pub mod url;
pub mod verify;
pub mod writer;

pub use credentials::Credentials;
pub use environment_file::EnvironmentFile;
pub use error::{Result, StoreError};
pub use objects::schedule::Need;
pub use objects::waiting::wait_as;
pub use reader::{Image, ReadOptions};
pub use url::StoreUrl;
pub use writer::{Checkpoint, Options, Writer};
