//! A client of a websocket (RFC 6455), as browsers have them: a stream of binary messages.

use std::io::{self, Error, Read, Write};

/// The example of the RFC, with the server's answer.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPTED_KEY: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
const ACCEPTED: &str = "HTTP/1.1 101 Switching Protocols";
const END_OF_HEADERS: &[u8] = b"\r\n\r\n";
/// The last (and only) frame of a binary message.
const BINARY_MESSAGE: u8 = 0x82;
const IS_MASKED: u8 = 0x80;
/// Length fields that stand for one of 2 or 8 bytes.
const LENGTH_16: u8 = 126;
const LENGTH_64: u8 = 127;
/// Changes nothing.
const MASK: [u8; 4] = [0; 4];

/// An open websocket.
pub struct Websocket<S> {
    stream: S,
    /// Bytes of the present message that were not read.
    unread: u64,
}

impl<S: Read + Write> Websocket<S> {
    /// Opens a websocket on a new connection to an HTTP server.
    pub fn open(mut stream: S) -> io::Result<Self> {
        write!(
            stream,
            "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Protocol: binary\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        while !answer.ends_with(END_OF_HEADERS) {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        let answer = String::from_utf8_lossy(&answer).into_owned();
        if answer.starts_with(ACCEPTED) && answer.contains(ACCEPTED_KEY) {
            Ok(Self { stream, unread: 0 })
        } else {
            Err(Error::other(format!("the answer {answer}")))
        }
    }

    /// Reads the beginning of a message.
    fn start_message(&mut self) -> io::Result<()> {
        let mut header = [0; 2];
        self.stream.read_exact(&mut header)?;
        if header[0] != BINARY_MESSAGE {
            return Err(Error::other(format!("a frame that begins with {header:x?}")));
        }
        self.unread = match header[1] {
            LENGTH_16 => {
                let mut length = [0; 2];
                self.stream.read_exact(&mut length)?;
                u16::from_be_bytes(length).into()
            }
            LENGTH_64 => {
                let mut length = [0; 8];
                self.stream.read_exact(&mut length)?;
                u64::from_be_bytes(length)
            }
            length => length.into(),
        };
        Ok(())
    }
}

impl<S: Read + Write> Read for Websocket<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.unread == 0 {
            self.start_message()?;
        }
        let wanted = buffer.len().min(self.unread.try_into().unwrap_or(usize::MAX));
        let read = self.stream.read(&mut buffer[..wanted])?;
        self.unread -= read as u64;
        Ok(read)
    }
}

impl<S: Write> Write for Websocket<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(usize::from(LENGTH_16 - 1));
        let mut frame = vec![BINARY_MESSAGE, IS_MASKED | length as u8];
        frame.extend(MASK);
        frame.extend(&bytes[..length]);
        self.stream.write_all(&frame)?;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
