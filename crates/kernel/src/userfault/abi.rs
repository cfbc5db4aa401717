//! The parts of `linux/userfaultfd.h` that no library crate provides.
//!
//! The `userfaultfd` crate needs libclang for its binding, and has neither asynchronous write protection nor poison.
//! The eight structures of this module are less than that dependency.

#![allow(missing_docs, reason = "named as in the kernel's header")]

use crate::ioctl;
use std::mem::{offset_of, size_of};

/// The device through which a process can create userfaultfds if it may open the device. Linux 6.1.
pub const DEVICE: &str = "/dev/userfaultfd";

/// The only version of the interface.
pub const UFFD_API: u64 = 0xaa;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Api {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Range {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Register {
    pub range: Range,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Copy_ {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    /// Bytes copied, or a negative error number.
    pub copy: i64,
}

/// `struct uffdio_zeropage`, `struct uffdio_continue` and `struct uffdio_poison`, which have the same layout.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Fill {
    pub range: Range,
    pub mode: u64,
    /// Bytes filled, or a negative error number.
    pub done: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteProtect {
    pub range: Range,
    pub mode: u64,
}

/// `struct uffd_msg`. The meaning of `words` depends on the event.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Message {
    pub event: u8,
    pub reserved1: u8,
    pub reserved2: u16,
    pub reserved3: u32,
    pub words: [u64; 3],
}

pub const EVENT_PAGEFAULT: u8 = 0x12;
pub const EVENT_FORK: u8 = 0x13;
pub const EVENT_REMAP: u8 = 0x14;
pub const EVENT_REMOVE: u8 = 0x15;
pub const EVENT_UNMAP: u8 = 0x16;

pub const PAGEFAULT_WRITE: u64 = 1;
pub const PAGEFAULT_WP: u64 = 2;
pub const PAGEFAULT_MINOR: u64 = 4;

/// The flag has the same value for copy, zeropage, continue and poison.
pub const MODE_DONTWAKE: u64 = 1;
pub const COPY_MODE_WP: u64 = 2;
pub const WRITEPROTECT_MODE_WP: u64 = 1;

pub const NEW: u64 = 0xaa00;
pub const API: u64 = 0xc018_aa3f;
pub const REGISTER: u64 = 0xc020_aa00;
pub const UNREGISTER: u64 = 0x8010_aa01;
pub const WAKE: u64 = 0x8010_aa02;
pub const COPY: u64 = 0xc028_aa03;
pub const ZEROPAGE: u64 = 0xc020_aa04;
pub const WRITEPROTECT: u64 = 0xc018_aa06;
pub const CONTINUE: u64 = 0xc020_aa07;
pub const POISON: u64 = 0xc020_aa08;

const KIND: u8 = 0xaa;
const _: () = assert!(NEW == ioctl::none(KIND, 0x00));
const _: () = assert!(API == ioctl::read_write(KIND, 0x3f, size_of::<Api>()));
const _: () = assert!(REGISTER == ioctl::read_write(KIND, 0x00, size_of::<Register>()));
const _: () = assert!(UNREGISTER == ioctl::read(KIND, 0x01, size_of::<Range>()));
const _: () = assert!(WAKE == ioctl::read(KIND, 0x02, size_of::<Range>()));
const _: () = assert!(COPY == ioctl::read_write(KIND, 0x03, size_of::<Copy_>()));
const _: () = assert!(ZEROPAGE == ioctl::read_write(KIND, 0x04, size_of::<Fill>()));
const _: () = assert!(WRITEPROTECT == ioctl::read_write(KIND, 0x06, size_of::<WriteProtect>()));
const _: () = assert!(CONTINUE == ioctl::read_write(KIND, 0x07, size_of::<Fill>()));
const _: () = assert!(POISON == ioctl::read_write(KIND, 0x08, size_of::<Fill>()));
const _: () = assert!(size_of::<Message>() == 32 && offset_of!(Message, words) == 8);
const _: () = assert!(offset_of!(Copy_, copy) == 32 && offset_of!(Fill, done) == 24);

/// The ioctl calls. The `_bad` macros of `nix` take the request number itself.
pub mod call {
    use super::{Api, Copy_, Fill, Range, Register, WriteProtect};
    nix::ioctl_readwrite_bad!(api, super::API, Api);
    nix::ioctl_readwrite_bad!(register, super::REGISTER, Register);
    nix::ioctl_read_bad!(unregister, super::UNREGISTER, Range);
    nix::ioctl_read_bad!(wake, super::WAKE, Range);
    nix::ioctl_readwrite_bad!(copy, super::COPY, Copy_);
    nix::ioctl_readwrite_bad!(zeropage, super::ZEROPAGE, Fill);
    nix::ioctl_readwrite_bad!(writeprotect, super::WRITEPROTECT, WriteProtect);
    nix::ioctl_readwrite_bad!(continue_, super::CONTINUE, Fill);
    nix::ioctl_readwrite_bad!(poison, super::POISON, Fill);
    nix::ioctl_write_int_bad!(new, super::NEW);
}
