//! Numbers by which the engine identifies connections and parts of requests, also in completions of the ring.

/// The number of a connected QEMU's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

/// The number of a part of a request in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartId {
    /// Number of the request.
    pub request: u32,
    /// Number of the part in the request.
    pub part: u32,
}
