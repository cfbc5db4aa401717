//! Every reboot technique, all with the same phases: prepare, suspend, renew, resume, settle.
//!
//! [`vmm`] replaces the QEMU process under a running guest (RootHammer's warm-VM reboot, TDSC 2010, sections 3 and
//! 4.2, of the VMM process instead of the whole host), with the two usual ways beside it.
//!
//! [`os`] reboots the guest's system; with a warm cache, what it had of its disks is there again (CacheMind, ICDCS 2010).
//!
//! [`host`] reboots the host under its guests (RootHammer, sections 3 and 4, with its kernel).

pub mod host;
pub mod os;
pub mod vmm;
