//! Raw Linux, with a safe face over it.
//!
//! This is the only crate that speaks ioctl, ptrace and raw process memory. Everything above it deals in the types
//! here: a [`process::Process`] that cannot be confused with a later one of the same number, the memory of another
//! process ([`memory`]), descriptors taken from or put into another process ([`descriptor`]), tap interfaces
//! ([`tap`]), frames ([`packet`]), network namespaces ([`netns`]) and hints about files ([`file`]).
//!
//! Constants and struct sizes that the kernel defines and no library gives us are asserted at compile time next to
//! their use.

#![allow(unsafe_code)]

pub mod descriptor;
pub mod file;
pub mod memory;
pub mod netns;
pub mod packet;
pub mod process;
pub mod spawn;
pub mod tap;
