//! A VM as a resource of a cluster manager: what `packaging/ocf/rekindle` has done by `rekindle ocf`.
//!
//! | module | what it is for |
//! |---|---|
//! | [`resource`] | what the cluster manager is told of the VM |
//! | [`start`] | the guest goes on from its newest checkpoint, or is booted |
//! | [`stop`] | a last checkpoint, then off; or shut down |
//! | [`migrate`] | it goes to another node while it runs |
//! | [`monitor`] | whether the guest really runs |
//! | [`loops`] | the process that takes checkpoints beside it |
//! | [`config`] | lines for the cluster manager's configuration |
//!
//! Who may run the guest is told by its store: [`rekindle_protect::owned`]. `docs/cluster.md` has what is promised.

pub mod config;
pub mod loops;
pub mod migrate;
pub mod monitor;
pub mod resource;
pub mod start;
pub mod stop;
