//! HTTP/1.1 `GET` on a persistent connection.

use crate::failure::{Broken, Failure};
use crate::target::Target;
use crate::wire::{Io, Wire, closed_early};

use super::Answer;
use super::response::Response;

/// Sends the same request repeatedly, and reads each whole answer.
#[derive(Debug)]
pub(super) struct Http {
    request: Vec<u8>,
    buffer: Vec<u8>,
}

impl Http {
    pub(super) fn new(target: &Target) -> Self {
        let request = format!(
            "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: rekindle-probe/{}\r\nAccept: */*\r\n\r\n",
            target.path(),
            target.authority(),
            env!("CARGO_PKG_VERSION")
        );
        Self { request: request.into_bytes(), buffer: vec![0; 64 << 10] }
    }

    pub(super) fn exchange(&mut self, wire: &mut Wire, io: &Io<'_>) -> Result<Answer, Broken> {
        wire.send(&self.request, io)?;
        let mut response = Response::default();
        loop {
            let received = wire.receive(&mut self.buffer, io)?;
            let ended = if received == 0 { response.end() } else { response.push(&self.buffer[..received]) };
            match ended {
                Ok(true) => break,
                // The stream ended before the answer was complete.
                Ok(false) if received == 0 => return Err(closed_early()),
                Ok(false) => {}
                Err(malformed) => {
                    let failure = Failure::WrongContent(malformed.to_string());
                    return Ok(Answer { keep: false, wrong: Some(failure) });
                }
            }
        }
        let status = response.status();
        Ok(Answer { keep: response.keep_alive(), wrong: (status >= 400).then_some(Failure::Status(status)) })
    }
}
