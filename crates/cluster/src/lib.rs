//! A VM or a libvirt domain as a resource of a cluster manager. Implements `rekindle ocf`, which the resource agent
//! `packaging/ocf/rekindle` calls.
//!
//! | module | contents |
//! |---|---|
//! | [`resource`] | the VM's parameters in the cluster manager |
//! | `guest` | what differs between VMs of Rekindle's own and domains of libvirt |
//! | [`start`] | resumes the guest from its newest checkpoint, or boots it |
//! | [`stop`] | takes a last checkpoint and ends QEMU, or shuts the guest down |
//! | [`migrate`] | moves the running guest to another node |
//! | [`monitor`] | checks whether the guest really runs |
//! | [`loops`] | the protector: the process that takes checkpoints of the guest |
//! | `store_query` | queries the store |
//! | `patience` | waits for answers with a time limit |
//! | [`outcome`] | how a start ends |
//! | [`config`] | commands for the cluster manager's configuration |
//!
//! The store decides which node may run the guest: [`rekindle_protect::owned`]. `docs/cluster.md` states the
//! guarantees.

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod config;
mod guest;
pub mod loops;
pub mod migrate;
pub mod monitor;
pub mod outcome;
pub mod resource;
pub mod start;
pub mod stop;
mod store_query;
