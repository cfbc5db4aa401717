//! One QEMU process.
//!
//! - [`qmp`]: talking to it (QEMU Machine Protocol);
//! - [`agent`]: the QEMU guest agent;
//! - [`binary`]: what a QEMU binary can do, asked before anything depends on it;
//! - [`mark`]: what a file was when a QEMU read it;
//! - [`program`]: which program a process runs, and whether that is a QEMU;
//! - [`syntax`]: which ways of writing an option it knows;
//! - [`command`]: the command line of a VM's hardware;
//! - [`cpu`]: what a guest sees of its processors;
//! - [`vmm`]: a running QEMU: started or adopted, its sockets, its end;
//! - [`options`]: the values of its command line's options;
//! - [`foreign`]: another program's command line, made into one of ours;
//! - [`monitor`], [`libvirt`]: connections to a QEMU that Rekindle did not start;
//! - [`adopt`]: a running QEMU that Rekindle did not start;
//! - [`guest`]: stopping and resuming its guest;
//! - [`hold`]: its guest's network output, held until it is released;
//! - [`userfaultfd`]: the right to make one, handed to a QEMU of another user;
//! - [`ramblock`]: where its RAM blocks are;
//! - [`rings`]: where the rings of its virtio devices are;
//! - [`stopped`]: proof that its guest is stopped;
//! - [`stream`]: QEMU's migration stream, as far as Rekindle writes and checks it;
//! - [`incoming`]: such a stream read as it comes, with all of the RAM;
//! - [`transfer`]: a stream out of one QEMU and into another.
//!
//! QEMU is stock: everything here is done through what any QEMU since 7.2 offers, and what differs between versions
//! is detected at run time, never derived from a version number.

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
