//! The ends of a VM's life that are not a reboot: what acts on a VM as a whole. What a VM *is* has crate `rekindle-vm`.
//!
//! | module | purpose |
//! |---|---|
//! | [`attach`] | makes a QEMU that Rekindle did not start a VM, and releases it |
//! | [`pause`] | stops a guest for its owner, and resumes it |
//! | [`shutdown`] | ends a guest: cleanly, or by powering it off |
//! | [`stop`] | `rekindle stop` |

pub mod attach;
pub mod pause;
pub mod shutdown;
pub mod stop;
