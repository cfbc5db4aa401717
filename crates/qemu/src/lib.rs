//! One QEMU process.
//!
//! - [`qmp`]: a client of the QEMU Machine Protocol;
//! - [`agent`]: the QEMU guest agent;
//! - [`binary`]: the features of a QEMU binary, queried before anything depends on them;
//! - [`mark`]: the identity of a file at the moment when a QEMU read it;
//! - [`program`]: which program a process runs, and whether that is a QEMU;
//! - [`syntax`]: which spelling of an option a QEMU accepts;
//! - [`command`]: the command line of a VM's hardware;
//! - [`cpu`]: the CPU features that a guest sees;
//! - [`devices`]: the device state of a stopped guest, saved into memory;
//! - [`vmm`]: a running QEMU, started or adopted: its sockets and its end;
//! - [`options`]: the values of command line options;
//! - [`foreign`]: the command line of a QEMU that Rekindle did not start, rewritten into one of ours;
//! - [`monitor`], [`libvirt`]: connections to a QEMU that Rekindle did not start;
//! - [`adopt`]: a running QEMU that Rekindle did not start;
//! - [`guest`]: stopping and resuming the guest;
//! - [`hold`]: the guest's network output, held until it is released;
//! - [`userfaultfd`]: the userfaultfd device, handed to a QEMU of another user;
//! - [`ramblock`]: where QEMU's RAM blocks are;
//! - [`rings`]: where the rings of the virtio devices are;
//! - [`stopped`]: proof that the guest is stopped;
//! - [`stream`]: QEMU's migration stream, as far as Rekindle writes and checks it;
//! - [`incoming`]: a migration stream with all of the RAM, read while it arrives;
//! - [`transfer`]: a stream out of one QEMU and into another.
//!
//! QEMU is stock. This crate uses only what every QEMU since 7.2 offers. Differences between versions are detected at
//! run time, never derived from a version number.

pub mod adopt;
pub mod agent;
pub mod binary;
pub mod command;
pub mod cpu;
pub mod devices;
pub mod foreign;
pub mod guest;
pub mod hold;
pub mod incoming;
pub mod libvirt;
pub mod mark;
pub mod monitor;
pub mod options;
pub mod program;
pub mod qmp;
pub mod ramblock;
pub mod rings;
pub mod stopped;
pub mod stream;
pub mod syntax;
pub mod transfer;
pub mod userfaultfd;
pub mod vmm;
