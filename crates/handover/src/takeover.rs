//! The transfer of the guest's taps from the source to the destination, without the loss of a frame.

use crate::HandoverError;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::packet::Capture;
use rekindle_kernel::process::Process;
use rekindle_kernel::stand_in::StandIn;
use rekindle_qemu::command::Hardware;
use rekindle_vm::network;
use std::os::fd::{OwnedFd, RawFd};

/// Open taps, with the descriptor numbers that a QEMU's command line names.
pub type Taps = Vec<(OwnedFd, RawFd)>;

/// The taps of a guest whose source still uses them. Until [`TapTakeover::give`], the destination has stand-ins for
/// them.
#[derive(Debug)]
pub struct TapTakeover {
    /// Kept until the guest runs: see [`network::Duplicates::stand_ins`].
    stand_ins: Vec<StandIn>,
    /// Captures of the frames that the host sends into the taps. They are kept until the hand-over is settled: closing
    /// a capture takes the kernel many milliseconds, and the next guest could be handed over in that time.
    captures: Vec<Capture>,
}

impl TapTakeover {
    /// Duplicates the taps of the running `source`. Also returns the taps with which the destination starts.
    ///
    /// # Errors
    /// [`HandoverError::Network`]: a tap cannot be duplicated.
    pub fn prepare(hardware: &Hardware, source: Process) -> Result<(Taps, Self), HandoverError> {
        let network::Duplicates { fds, stand_ins } = network::duplicate(hardware, source)?;
        Ok((fds, Self { stand_ins, captures: Vec::new() }))
    }

    /// Captures the frames that the host sends into the taps from now on, for [`TapTakeover::send_again`].
    ///
    /// # Errors
    /// [`HandoverError::Network`]: a capture cannot be opened.
    pub fn capture(&mut self, hardware: &Hardware) -> Result<(), HandoverError> {
        self.captures = network::captures(hardware)?;
        Ok(())
    }

    /// Discards the frames that were captured until now.
    pub fn discard_captured(&self) {
        for capture in &self.captures {
            let _ = capture.frames();
        }
    }

    /// Gives the taps to the destination. No other QEMU may use them any more.
    ///
    /// # Errors
    /// [`HandoverError::File`]: the destination cannot be traced; some of its taps may be replaced already.
    pub fn give(&self, hardware: &Hardware, destination: Injector) -> Result<(), HandoverError> {
        if self.stand_ins.is_empty() {
            return Ok(());
        }
        let pid = destination.process().pid;
        network::replace_stand_ins(destination, hardware, &self.stand_ins)
            .map_err(|source| HandoverError::File { path: format!("/proc/{pid}/fd").into(), source })
    }

    /// Sends again the frames that the source may have received after its guest had stopped. Returns the captures that
    /// are finished, without closing them. A capture that has no frame after the stop yet is tried again by the next
    /// call.
    pub fn send_again(&mut self, stopped_host_us: u64) -> Vec<Capture> {
        let captures = std::mem::take(&mut self.captures).into_iter();
        let (finished, unfinished) = captures.partition(|capture| network::resend_frames(capture, stopped_host_us));
        self.captures = unfinished;
        finished
    }
}
