//! `rekindle replace-qemu` and `attach`: replacing and adopting QEMUs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

mod attach;
mod bare;
mod bridge;
mod confinement;
mod descriptors;
mod events;
mod generation;
mod helpers;
mod hugepages;
mod in_place;
mod kills;
mod overlay_faults;
mod overlays;
mod overlays_libvirt;
mod processes;
mod qemu_user;
mod queues;
mod replace;
mod sandbox;
mod stalls;
mod trust;
mod versions;
