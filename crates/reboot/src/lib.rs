//! The reboot techniques. All have the same phases: prepare, suspend, renew, resume, settle.
//!
//! [`vmm`] replaces the QEMU process under a running guest (RootHammer's warm-VM reboot, TDSC 2010, sections 3 and 4.2,
//! applied to the VMM process instead of the whole host). The two conventional methods, saved and cold, are implemented
//! for comparison.
//!
//! [`os`] reboots the guest's system. With a warm cache, disk blocks that the previous guest had cached are served from
//! its RAM (CacheMind, ICDCS 2010).
//!
//! [`host`] reboots the host under its guests (RootHammer, sections 3 and 4, with its kernel).
//!
//! [`libvirt`] replaces the QEMU process of a domain that libvirt manages, [`bare`] that of a guest that neither Rekindle
//! nor libvirt has started.
//!
//! [`moving`] moves a VM to another host, and gives a guest that stays its disks back.
//!
//! [`recover`] finishes or undoes interrupted operations.

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod bare;
mod deferred_signals;
mod domain_error;
pub mod error;
pub mod host;
pub(crate) mod interrupted;
pub mod libvirt;
pub mod moving;
pub mod os;
pub(crate) mod parallel;
pub mod recover;
mod unprepared;
mod unprepared_error;
pub mod vmm;
