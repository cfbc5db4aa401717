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
//! | [`logs`] | its logs, which are bounded |
//! | [`network`] | taps, namespaces, bridges |
//! | [`hardware`] | a definition made into what QEMU is given, pinned |
//! | [`place`] | what a VM has before it has a QEMU |
//! | [`ram`] | its RAM, for a new boot |
//! | [`life`] | start, status, stop |
//! | [`cleanup`] | removing all that is kept of a VM |
//! | [`qemu`] | its QEMU processes, and what they report of the guest |
//! | [`error`] | why something could not be done with a VM |
//! | [`names`] | the names of its files outside the run directory |
//! | [`shutdown`] | shutting a guest down, or powering it off |
//! | [`attach`] | VMs whose QEMU Rekindle did not start |
//! | [`doctor`] | checks of this host, with hints |

pub mod attach;
pub mod cleanup;
pub mod definition;
pub mod disks;
pub mod doctor;
pub mod error;
pub mod fault;
pub mod hardware;
pub mod helpers;
pub mod host;
pub mod journal;
pub mod life;
pub mod lock;
pub mod logs;
pub mod names;
pub mod network;
pub mod phases;
pub mod place;
pub mod qemu;
pub mod ram;
pub mod rundir;
pub mod samples;
pub mod shutdown;
pub mod state;
pub mod timeline;
