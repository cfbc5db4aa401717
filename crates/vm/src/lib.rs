//! A virtual machine as its owner defines it, and what Rekindle keeps about it while it runs.

pub mod definition;
