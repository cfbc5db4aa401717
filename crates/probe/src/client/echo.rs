//! Numbered messages on one connection. The service must return each message unchanged.

use crate::failure::{Failure, NoAnswer};
use crate::wire::{Io, Wire, closed_early};

use super::Answer;

/// The messages of one connection. All are lines of the same length, so that services that echo lines work, too.
#[derive(Debug)]
pub(super) struct Echo {
    id: usize,
    number: u64,
}

impl Echo {
    pub(super) fn new(id: usize) -> Self {
        Self { id, number: 0 }
    }

    /// Returns the next message. The numbers continue over a new connection, so that an old answer cannot match a new
    /// message.
    fn next_message(&mut self) -> String {
        self.number += 1;
        format!("rekindle-probe {:04x} {:016x}\n", self.id, self.number)
    }

    pub(super) fn exchange(&mut self, wire: &mut Wire, io: &Io<'_>) -> Result<Answer, NoAnswer> {
        let message = self.next_message();
        wire.send(message.as_bytes(), io)?;
        let mut buffer = [0; 64];
        let mut echoed = 0;
        while echoed < message.len() {
            let received = wire.receive(&mut buffer, io)?;
            if received == 0 {
                return Err(closed_early());
            }
            let bytes = &buffer[..received];
            if !message.as_bytes()[echoed..].starts_with(bytes) {
                let text = format!("{:?} is no echo of {:?}", String::from_utf8_lossy(bytes), &message[echoed..]);
                // Later bytes cannot be assigned to a request any more.
                return Ok(Answer { keeps_connection: false, fault: Some(Failure::WrongContent(text)) });
            }
            echoed += received;
        }
        Ok(Answer { keeps_connection: true, fault: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_numbered_lines_of_one_length() {
        let mut echo = Echo::new(0x2a);
        assert_eq!(echo.next_message(), "rekindle-probe 002a 0000000000000001\n");
        assert_eq!(echo.next_message(), "rekindle-probe 002a 0000000000000002\n");
    }
}
