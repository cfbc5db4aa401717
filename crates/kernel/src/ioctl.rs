//! Ioctl numbers, computed from kind, number and argument size as in `asm-generic/ioctl.h`.

const WRITE: u64 = 1;
const READ: u64 = 2;

const fn number(direction: u64, kind: u8, number: u8, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | ((kind as u64) << 8) | number as u64
}

/// `_IO(kind, number)`.
pub const fn none(kind: u8, nr: u8) -> u64 {
    number(0, kind, nr, 0)
}

/// `_IOW(kind, number, size)`.
pub const fn write(kind: u8, nr: u8, size: usize) -> u64 {
    number(WRITE, kind, nr, size)
}

/// `_IOR(kind, number, size)`.
pub const fn read(kind: u8, nr: u8, size: usize) -> u64 {
    number(READ, kind, nr, size)
}

/// `_IOWR(kind, number, size)`.
pub const fn read_write(kind: u8, nr: u8, size: usize) -> u64 {
    number(READ | WRITE, kind, nr, size)
}
