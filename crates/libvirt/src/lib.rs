//! Domains: guests that libvirt runs, and libvirt's daemon, which starts and manages them.
//!
//! | module | contents |
//! |---|---|
//! | [`status_file`] | the daemon's record of a running domain |
//! | [`graphics_password`] | the passwords of a domain's VNC and SPICE servers |
//! | [`domains`] | all running domains |
//! | [`disks`] | the disks in a domain's XML |
//! | [`host_access`] | what the XML of a domain uses of the host that runs it |
//! | [`portable_xml`] | a domain for another host: what it needs there, its disks on other files |
//! | [`save_image`] | the start of the file that `virsh restore` reads |
//! | [`daemon`] | finds, stops and starts the daemon |

#![allow(missing_docs, reason = "an internal crate: comments only where a name is not enough")]

pub mod daemon;
pub mod disks;
pub mod domains;
pub mod graphics_password;
pub mod host_access;
pub mod portable_xml;
pub mod save_image;
pub mod status_file;
