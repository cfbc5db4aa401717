//! Domains: guests that libvirt runs.
//!
//! | module | contents |
//! |---|---|
//! | [`status`] | what libvirt's daemon records of a running domain |

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod status;
