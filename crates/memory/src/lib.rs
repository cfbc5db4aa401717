//! Guest RAM as data.
//!
//! - [`ram`]: the RAM blocks of a running QEMU, and reading them;
//! - [`tracker`]: finding the pages of RAM blocks that were written;
//! - [`missing`]: loading a guest's pages while it runs;
//! - [`moving`]: the pages of a stopped QEMU, which are dropped when another one has them;
//! - [`directory`]: directories for RAM files, their free space, Rekindle's own tmpfs;
//! - [`hugepages`]: free huge pages of a hugetlbfs;
//! - [`room`]: how much memory a process can still allocate;
//! - [`carried`]: RAM blocks that end with their QEMU (firmware, ACPI tables, video memory);
//! - [`digest`]: digests of a stopped guest's memory, to prove that it did not change.

#![allow(missing_docs, reason = "a name that needs no explanation gets no comment")]

pub mod carried;
pub mod digest;
pub mod directory;
pub mod hugepages;
pub mod missing;
pub mod moving;
pub mod ram;
pub mod room;
pub mod tracker;
