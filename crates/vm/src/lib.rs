//! A virtual machine as its owner defines it, and what Rekindle keeps about it while it runs.
//!
//! | module | what it is for |
//! |---|---|
//! | [`definition`] | the TOML file |
//! | [`host`] | where this user keeps VMs on this host |
//! | [`rundir`] | the run directory of one VM: paths, listing, writing files so that a crash leaves old or new |
//! | [`lock`] | one operation at a time, and which process holds the lock |
//! | [`journal`] | the operation in hand, so that a crash can be finished or undone |
//! | [`state`] | what runs |
//! | [`timeline`] | what happened when |
//! | [`samples`] | what host and guests have left, over time |
//! | [`fault`] | numbered points at which a test can make Rekindle or a QEMU die |
//! | [`disks`] | the servers of its disks |
//! | [`helpers`] | the processes that serve it apart from its QEMU, and which of them are missing |
//! | [`phases`] | whether its disks are still what the guest of a phase knew |
//! | [`logs`] | its logs: where they are, and that they are bounded |
//! | [`network`] | taps, namespaces, bridges |
//! | [`hardware`] | a definition made into what QEMU is given, pinned |
//! | [`place`] | what a VM has before it has a QEMU |
//! | [`ram`] | its RAM, for a new boot |
//! | [`life`] | start, status, stop, clean up |
//! | [`shutdown`] | shutting a guest down, or powering it off |
//! | [`attach`] | VMs whose QEMU Rekindle did not start |
//! | [`doctor`] | checks of this host, with hints |

pub mod attach;
pub mod definition;
pub mod disks;
pub mod doctor;
pub mod fault;
pub mod hardware;
pub mod helpers;
pub mod host;
pub mod journal;
pub mod life;
pub mod lock;
pub mod logs;
pub mod network;
pub mod phases;
pub mod place;
pub mod ram;
pub mod rundir;
pub mod samples;
pub mod shutdown;
pub mod state;
pub mod timeline;
