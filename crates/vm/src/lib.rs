//! A virtual machine as its owner defines it, and what Rekindle keeps about it while it runs.
//!
//! | module | purpose |
//! |---|---|
//! | [`definition`] | the TOML file |
//! | [`host`] | the directories of this user's VMs on this host |
//! | [`restore_rules`] | what checkpoints may use of this host |
//! | [`rundir`] | the run directory of one VM: paths, listing, writing files so that a crash leaves the old or the new content |
//! | [`lock`] | one operation at a time, and which process holds the lock |
//! | [`journal`] | the journal of an operation, so that it can be finished or undone after a crash |
//! | [`state`] | the definition, hardware and QEMU of a VM |
//! | [`timeline`] | the steps of operations, with their times |
//! | [`events`] | what was done to a VM and what went wrong, for people and scripts |
//! | [`samples`] | free resources of host and guests over time |
//! | [`fault`] | fault points, at which a test can kill Rekindle or a QEMU |
//! | [`disks`] | the servers of a VM's disks |
//! | [`overlays`] | the disks that a VM's QEMU itself serves, at the moments of its checkpoints |
//! | [`helpers`] | the processes that serve a VM in addition to its QEMU, and which of them are missing |
//! | [`phases`] | checks whether a VM's disks are unchanged since a boot snapshot |
//! | [`logs`] | a VM's logs, which are bounded |
//! | [`network`] | taps, namespaces, bridges |
//! | [`hardware`] | the hardware of a definition, pinned |
//! | [`slot`] | everything that a VM has before it has a QEMU |
//! | [`direct_monitors`] | Rekindle's own monitors in a QEMU that libvirt manages |
//! | [`ram`] | a VM's RAM, for a new boot |
//! | [`status`] | the status of a VM |
//! | [`locked_vm`] | a VM that is locked for an operation |
//! | [`causes`] | the text of an error with its causes |
//! | [`cleanup`] | removal of everything that is kept of a VM |
//! | [`qemu`] | a VM's QEMU processes, and the meaning of the guest's run states |
//! | [`qemu_user`] | the user as which a VM's QEMU runs, and the files that exist for it |
//! | [`error`] | errors of operations on a VM |
//! | [`names`] | names of a VM's files outside the run directory |
//! | [`doctor`] | checks of this host, with hints |

pub mod causes;
pub mod cleanup;
pub mod definition;
pub mod direct_monitors;
pub mod disks;
pub mod doctor;
pub mod error;
pub mod events;
pub mod fault;
pub mod hardware;
pub mod helpers;
pub mod host;
pub mod journal;
pub mod lock;
pub mod locked_vm;
pub mod logs;
pub mod names;
pub mod network;
pub mod overlays;
pub mod phases;
pub mod qemu;
pub mod qemu_user;
pub mod ram;
pub mod restore_rules;
pub mod rundir;
pub mod samples;
pub mod slot;
pub mod state;
pub mod status;
pub mod timeline;
