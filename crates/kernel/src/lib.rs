//! Raw Linux, with a safe interface.
//!
//! This is the only crate that speaks ioctl, ptrace and raw process memory. Everything above it deals in the types
//! here: a [`process::Process`] that cannot be confused with a later one of the same number, the memory of another
//! process ([`maps`], [`memory`]), which of its pages were written ([`pagemap`], [`softdirty`]) or are to be supplied
//! ([`userfault`]), system calls that it makes for us ([`inject`]), descriptors taken from or put into another
//! process ([`descriptor`]), tap interfaces ([`tap`]), interfaces as such ([`link`]), frames ([`packet`]), network
//! namespaces ([`netns`]), concurrent reads and writes of files ([`uring`]), hints about files ([`file`]), files that
//! are mapped here ([`mapping`]), memory for much data ([`large`]), scheduling priority ([`sched`]), and loading the
//! next kernel ([`kexec`]).
//!
//! Constants and struct sizes that the kernel defines and no library gives us are asserted at compile time next to
//! their use.

#![allow(unsafe_code)]

pub mod descriptor;
pub mod file;
pub mod inject;
mod ioctl;
pub mod kexec;
pub mod large;
pub mod lines;
pub mod link;
pub mod lockfile;
pub mod mapping;
pub mod maps;
pub mod memory;
pub mod netns;
pub mod output;
pub mod packet;
pub mod pagemap;
pub mod process;
pub mod sched;
pub mod softdirty;
pub mod spawn;
pub mod stand_in;
pub mod tap;
#[cfg(test)]
mod testing;
pub mod uring;
pub mod userfault;
