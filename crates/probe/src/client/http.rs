//! HTTP/1.1 `GET` on a persistent connection.

use crate::failure::{Failure, NoAnswer};
use crate::target::Target;
use crate::wire::{Io, Wire, closed_early};

use super::Answer;
use super::response::ResponseParser;

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

    pub(super) fn exchange(&mut self, wire: &mut Wire, io: &Io<'_>) -> Result<Answer, NoAnswer> {
        wire.send(&self.request, io)?;
        let mut parser = ResponseParser::default();
        loop {
            let received = wire.receive(&mut self.buffer, io)?;
            let is_complete = if received == 0 { parser.end() } else { parser.push(&self.buffer[..received]) };
            match is_complete {
                Ok(true) => break,
                // The stream ended before the answer was complete.
                Ok(false) if received == 0 => return Err(closed_early()),
                Ok(false) => {}
                Err(malformed) => {
                    let failure = Failure::WrongContent(malformed.to_string());
                    return Ok(Answer { keeps_connection: false, fault: Some(failure) });
                }
            }
        }
        let status = parser.status();
        Ok(Answer { keeps_connection: parser.keep_alive(), fault: (status >= 400).then_some(Failure::Status(status)) })
    }
}
