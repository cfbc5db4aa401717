//! Metrics of this host's guests, their checkpoints and their replacements, for Prometheus: `rekindle metrics`.
//!
//! | module | contents |
//! |---|---|
//! | [`catalog`] | the metrics, their units and their descriptions |
//! | [`collect`] | reads the figures from the run directories |
//! | `timeline` | counts operations in the timeline of a VM |
//! | [`exposition`] | OpenMetrics and Prometheus text |
//! | [`server`] | answers scrapes over HTTP |
//!
//! The exporter only reads files and `/proc`. It connects to no QEMU and no helper, takes no lock, and never waits for
//! either. `docs/metrics.md` has the reference.

#![allow(missing_docs, reason = "an internal crate: a name that needs no comment has none")]

pub mod catalog;
pub mod collect;
pub mod exposition;
pub mod server;
mod timeline;
