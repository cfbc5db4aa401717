//! Metrics of this host's guests, their checkpoints and their replacements, for Prometheus, and a page that shows them
//! live: `rekindle metrics`.
//!
//! | module | contents |
//! |---|---|
//! | [`catalog`] | the metrics, their units and their descriptions |
//! | [`collect`] | reads the figures from the run directories |
//! | `timeline` | counts operations in the timeline of a VM, and keeps the last one |
//! | [`exposition`] | OpenMetrics and Prometheus text |
//! | `page` | the page, and the events that keep it up to date |
//! | [`server`] | answers scrapes, and serves the page, over HTTP |
//!
//! The exporter only reads files and `/proc`. It connects to no QEMU and no helper, takes no lock, and never waits for
//! either. `docs/metrics.md` has the reference, `docs/page.md` describes
//! the page.

#![allow(missing_docs, reason = "an internal crate: a name that needs no comment has none")]

pub mod catalog;
pub mod collect;
pub mod exposition;
mod page;
pub mod server;
mod timeline;
