//! The channel to a front end: a socket that the front end passes (`VHOST_USER_SET_BACKEND_REQ_FD`), on which the
//! server sends notifications.
//!
//! The only notification is that the disk has grown. The `vhost` crate takes the socket from the front end's message
//! and has no function to send this notification. Therefore the message is peeked first, which also yields a
//! descriptor of the socket.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Bytes of a message's header: request, flags, length of the body.
const HEADER_BYTES: usize = 12;
/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_BACKEND_REQ_FD: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE_MSG: u32 = 2;
/// Protocol version, which the flags of every message contain.
const VERSION: u32 = 1;
/// Most descriptors of a message that are received: the channel is the first one.
const MAX_DESCRIPTORS: usize = 4;

/// Waits for the next message of a front end and leaves it in the socket. Returns the channel if the message passes a
/// channel.
pub fn peek_offered_channel(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut header = [0; HEADER_BYTES];
    let received = peek(stream, &mut header, &mut RecvAncillaryBuffer::default())?;
    let request = header.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    if received < HEADER_BYTES || request != Some(SET_BACKEND_REQ_FD) {
        return Ok(None);
    }
    // The message has arrived, so this call does not wait.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    peek(stream, &mut header, &mut ancillary)?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(descriptors.flatten().next())
}

/// Waits for a message's header and descriptors, and leaves them in the socket. Returns the number of bytes.
fn peek(
    stream: &UnixStream,
    header: &mut [u8; HEADER_BYTES],
    ancillary: &mut RecvAncillaryBuffer<'_>,
) -> io::Result<usize> {
    loop {
        let mut parts = [IoSliceMut::new(header)];
        match recvmsg(stream, &mut parts, ancillary, RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => return Ok(received?.bytes),
        }
    }
}

/// Notifies the front end that the configuration space has changed, so that the front end reads it again. Does not
/// wait.
///
/// # Errors
/// Errors of `send(2)`, for example if the front end has disconnected or does not read.
pub fn notify_config_changed(channel: &OwnedFd) -> io::Result<()> {
    let message = [CONFIG_CHANGE_MSG, VERSION, 0].map(u32::to_ne_bytes).concat();
    send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::{IoSlice, Read, Write};
    use std::os::fd::AsFd;

    fn send_message(stream: &UnixStream, request: u32, descriptor: Option<&UnixStream>) {
        let message = [request, VERSION, 0].map(u32::to_ne_bytes).concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptor.iter().map(|stream| stream.as_fd()).collect();
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        sendmsg(stream, &[IoSlice::new(&message)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_channel_is_found_and_its_message_stays() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (server_end, mut front_end) = UnixStream::pair().unwrap();
        // Another message with a descriptor, then the message with the channel.
        send_message(&theirs, 5, Some(&server_end));
        assert!(peek_offered_channel(&ours).unwrap().is_none());
        let mut header = [0; HEADER_BYTES];
        (&ours).read_exact(&mut header).unwrap();
        send_message(&theirs, SET_BACKEND_REQ_FD, Some(&server_end));
        let channel = peek_offered_channel(&ours).unwrap().unwrap();
        (&ours).read_exact(&mut header).unwrap();
        assert_eq!(header[..4], SET_BACKEND_REQ_FD.to_ne_bytes());
        drop(server_end);
        notify_config_changed(&channel).unwrap();
        front_end.read_exact(&mut header).unwrap();
        assert_eq!(header, *[2u32, 1, 0].map(u32::to_ne_bytes).concat());
        // A message without a descriptor, a partial message, and no message.
        send_message(&theirs, SET_BACKEND_REQ_FD, None);
        assert!(peek_offered_channel(&ours).unwrap().is_none());
        (&ours).read_exact(&mut header).unwrap();
        (&theirs).write_all(&header[..5]).unwrap();
        assert!(peek_offered_channel(&ours).unwrap().is_none());
        drop(theirs);
        (&ours).read_exact(&mut header[..5]).unwrap();
        assert!(peek_offered_channel(&ours).unwrap().is_none());
        drop(front_end);
        assert!(notify_config_changed(&channel).is_err());
    }
}
