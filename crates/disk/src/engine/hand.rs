//! A second pair of hands: what was moved in large pieces is digested beside the engine's own thread, which answers the guest and takes the
//! next request meanwhile. One thread that does both gives about 3 GB/s; there are disks that give more.
//!
//! The hand has the buffer, which nobody changes any more, and nothing of the engine: what it finds is noted by [`super::job`].

use crate::block::BLOCK;
use crate::digest::{Digest, Digester};
use rekindle_kernel::uring::Buffer;
use rustix::io::write;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Pieces of fewer bytes are not worth the way.
pub(super) const LARGE: usize = 128 << 10;
/// So many pieces are given to it ahead, at most.
const AHEAD: usize = 4;

/// Something to be digested: the blocks that lie in `bytes` of the buffer one behind the other.
pub(super) struct Piece {
    /// What it belongs to.
    pub of: usize,
    pub buffer: Buffer,
    pub bytes: Range<usize>,
    pub digester: Digester,
}

/// A piece that has come back.
pub(super) struct Back {
    pub of: usize,
    pub buffer: Buffer,
    pub digests: Vec<Digest>,
}

impl Piece {
    /// Do it.
    pub fn digest(self) -> Back {
        let Self { of, buffer, bytes, digester } = self;
        let digests = digests(digester, buffer.get(bytes).unwrap_or_default()).collect();
        Back { of, buffer, digests }
    }
}

/// Of whole blocks.
pub(super) fn digests(digester: Digester, bytes: &[u8]) -> impl Iterator<Item = Digest> {
    bytes.as_chunks::<BLOCK>().0.iter().map(move |block| digester.of(block))
}

/// See [the module](self). It ends when it is dropped.
pub(super) struct Hand {
    given: Sender<Piece>,
    back: Receiver<Back>,
    /// Pieces that have not been taken back.
    out: usize,
}

impl Hand {
    /// Begin. Whoever waits for `wake` is told when something comes back.
    ///
    /// # Errors
    /// The system's: no thread can be had.
    pub fn begin(wake: Arc<OwnedFd>) -> io::Result<Self> {
        let (given, work) = channel::<Piece>();
        let (done, back) = channel();
        thread::Builder::new().name("disk-digest".into()).spawn(move || {
            for piece in work {
                if done.send(piece.digest()).is_err() {
                    return;
                }
                let _ = write(&wake, &1u64.to_ne_bytes());
            }
        })?;
        Ok(Self { given, back, out: 0 })
    }

    /// Whether it would begin with another piece soon.
    pub fn is_free(&self) -> bool {
        self.out < AHEAD
    }

    /// Give it a piece.
    ///
    /// # Errors
    /// The piece, if there is no thread any more.
    pub fn give(&mut self, piece: Piece) -> Result<(), Piece> {
        self.given.send(piece).map_err(|refused| refused.0)?;
        self.out += 1;
        Ok(())
    }

    /// What has come back.
    pub fn take_back(&mut self) -> Option<Back> {
        let back = self.back.try_recv().ok()?;
        self.out -= 1;
        Some(back)
    }

    /// The next that comes back. `None`: there is none, or there is no thread any more.
    pub fn wait_back(&mut self) -> Option<Back> {
        if self.out == 0 {
            return None;
        }
        self.out -= 1;
        self.back.recv().ok()
    }
}
