//! Guest RAM as data.
//!
//! - [`ram`]: all RAM blocks of a running QEMU, and how they are read;
//! - [`tracker`]: which of their pages were written;
//! - [`missing`]: bringing a guest's pages while it runs already;
//! - [`pages`]: sets of pages;
//! - [`directory`]: where RAM files live, how much still fits, the tmpfs of Rekindle's own;
//! - [`hugepages`]: what a hugetlbfs has left;
//! - [`carried`]: the RAM blocks that do not outlive their QEMU by themselves (firmware, ACPI tables, video memory);
//! - [`digest`]: digests of a stopped guest's whole memory, to prove that it did not change.

pub mod carried;
pub mod digest;
pub mod directory;
pub mod hugepages;
pub mod missing;
pub mod pages;
pub mod ram;
pub mod tracker;
