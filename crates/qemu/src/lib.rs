//! One QEMU process.
//!
//! Talking to QEMU:
//!
//! | module | contents |
//! |---|---|
//! | [`qmp`] | a client of the QEMU Machine Protocol |
//! | [`agent`] | the QEMU guest agent |
//! | [`socket`] | connections to the sockets of a QEMU |
//! | [`monitor`], [`libvirt`] | connections to a QEMU that Rekindle did not start |
//!
//! Starting and finding a QEMU:
//!
//! | module | contents |
//! |---|---|
//! | [`binary`] | the features of a QEMU binary, queried before anything depends on them |
//! | [`file_identity`] | the identity of a file at the moment when a QEMU read it |
//! | [`syntax`] | which spelling of an option a QEMU accepts |
//! | [`options`] | the values of command line options |
//! | [`command`] | the description of a VM's machine, and the command line that builds it |
//! | [`vmm`] | a running QEMU, started or adopted: its sockets and its end |
//! | [`program`] | which program a process runs, and whether that is a QEMU |
//! | [`outdated`] | whether a running QEMU is older than the installed one |
//! | [`adopt`] | a running QEMU that Rekindle did not start |
//! | [`foreign`] | the command line of such a QEMU, rewritten into one of ours |
//! | [`host_access`] | what such a command line uses of the host that runs it |
//! | [`used_files`] | the files that a QEMU opens, whose access its user needs |
//! | [`takeover_command`] | the command line of such a QEMU, rewritten for a QEMU that takes its guest over |
//! | [`cpu`] | the CPU features that a guest sees |
//!
//! The guest and its state:
//!
//! | module | contents |
//! |---|---|
//! | [`guest`] | stopping and resuming the guest |
//! | [`stopped`] | proof that the guest is stopped |
//! | [`block`] | overlays on the guest's disks, made and merged by QEMU |
//! | [`dirty_rate`] | how fast the guest changes its memory |
//! | [`drain`] | waiting for the block I/O that a running guest has in flight |
//! | [`hold`] | the guest's network output, held until it is released |
//! | [`ramblock`] | where QEMU's RAM blocks are |
//! | [`virtio_queues`] | the queues of the virtio devices |
//! | [`rings`] | where the rings of the virtio devices are |
//! | [`userfaultfd`] | the userfaultfd device, handed to a QEMU of another user |
//! | [`devices`] | the device state of a stopped guest, saved into memory |
//! | [`stream`] | QEMU's migration stream, as far as Rekindle writes and checks it |
//! | [`incoming`] | a migration stream with all of the RAM, read while it arrives |
//! | [`transfer`] | a stream out of one QEMU and into another |
//!
//! QEMU is stock. This crate uses only what every QEMU since 7.2 offers. Differences between versions are detected at
//! run time, never derived from a version number.

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod adopt;
pub mod agent;
pub mod binary;
pub mod block;
pub mod command;
pub mod cpu;
pub mod devices;
pub mod dirty_rate;
pub mod drain;
pub mod file_identity;
pub mod foreign;
pub mod guest;
pub mod hold;
pub mod host_access;
pub mod incoming;
pub mod libvirt;
pub mod monitor;
pub mod options;
pub mod outdated;
pub mod piped_save;
pub mod program;
pub mod qmp;
pub mod ramblock;
pub mod rings;
pub mod socket;
pub mod stopped;
pub mod stream;
pub mod syntax;
pub mod takeover_command;
pub mod transfer;
pub mod used_files;
pub mod userfaultfd;
pub mod vhost;
pub mod virtio_queues;
pub mod vmm;
