//! A client of the micro guest's command service, which replies to each line with a line.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// Port of the service in the guest.
pub const PORT: u16 = 7000;

/// Sends a command and returns the reply, which must be complete. `timeout` is the limit for each read.
pub fn exchange(stream: &TcpStream, command: &str, timeout: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(timeout))?;
    writeln!(&*stream, "{command}")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    if reply.ends_with('\n') { Ok(reply.trim_end().into()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Returns a TCP port on which no process listens.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}
