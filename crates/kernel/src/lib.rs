//! Raw Linux, with a safe interface.
//!
//! No other crate uses ioctl, ptrace or raw process memory. The other crates use the types of this one:
//!
//! - processes: identity ([`process::Process`], which cannot be confused with a later process of the same number),
//!   starting and finding them ([`spawn`], [`jail`], [`surroundings`], [`lockfile`]), their output ([`output`], [`lines`]), mappings ([`maps`]),
//!   memory ([`memory`], [`heap`], [`private_pages`]), written pages ([`pagemap`], [`softdirty`]), supplying missing pages
//!   ([`userfault`]), injected system calls ([`inject`]), descriptors ([`descriptor`], [`descriptor_limit`]), scheduling ([`sched`]), numbers of users ([`users`]);
//! - networks: tap interfaces ([`tap`], [`stand_in`], [`vhost_net`]), other interfaces ([`link`]), frames ([`packet`]), network
//!   namespaces ([`netns`]);
//! - files: concurrent reads and writes ([`uring`]), hints and locks ([`file`]), access control lists ([`access_list`]), what tests replace by a
//!   disk that can lose power ([`durable_file`]), those that a process writes ([`written_files`]), how often one was opened for
//!   writing ([`write_watch`]), mapped files ([`mapping`]), large buffers ([`large`]), the read-only flag of block devices
//!   ([`block_device`]);
//! - loading the next kernel ([`kexec`]); services of systemd ([`systemd`]);
//! - libvirt's C library ([`libvirt_client`]); time limits for answers that may never come ([`patience`], [`unix_socket`]).
//!
//! Constants and structure sizes that the kernel defines and no library provides are asserted at compile time next to
//! their use.

#![allow(unsafe_code)]

pub mod access_list;
pub mod block_device;
pub mod confinement;
pub mod descriptor;
pub mod descriptor_limit;
pub mod durable_file;
pub mod file;
pub mod heap;
pub mod inject;
mod ioctl;
pub mod jail;
pub mod kexec;
pub mod large;
pub mod libvirt_client;
pub mod lines;
pub mod link;
pub mod lockfile;
pub mod mapping;
pub mod maps;
pub mod memory;
pub mod mounts;
pub mod netns;
pub mod output;
pub mod packet;
pub mod pagemap;
pub mod patience;
pub mod private_pages;
pub mod process;
pub mod sched;
pub mod softdirty;
pub mod spawn;
pub mod stand_in;
pub mod surroundings;
pub mod systemd;
pub mod tap;
#[cfg(test)]
mod testing;
pub mod unix_socket;
pub mod uring;
pub mod userfault;
pub mod users;
pub mod vhost_net;
pub mod write_watch;
pub mod written_files;
