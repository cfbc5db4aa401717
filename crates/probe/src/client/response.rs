//! An HTTP/1.1 response, parsed in pieces as they are received. The body is only counted (RFC 9112, section 6.3).

use httparse::{EMPTY_HEADER, Header, Status, parse_chunk_size};

/// Limit of bytes in a response's head, or in a line of a chunked body.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 128;

/// Why bytes are not an HTTP/1 response to a `GET`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("not an HTTP/1 response ({0})")]
    Head(httparse::Error),
    #[error("HTTP head longer than {MAX_HEAD_BYTES} bytes")]
    HeadTooLong,
    #[error("HTTP 101: the server changed the protocol, unasked")]
    Upgrade,
    #[error("bad Content-Length")]
    ContentLength,
    #[error("bad chunk in a chunked body")]
    Chunk,
    #[error("{0} bytes more than the HTTP response has")]
    Surplus(usize),
}

/// Parses a response while it is received.
#[derive(Debug, Default)]
pub(super) struct ResponseParser {
    state: ParserState,
    /// The incomplete head, or the incomplete line of a chunked body.
    partial: Vec<u8>,
    status: u16,
    keep_alive: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ParserState {
    #[default]
    Head,
    /// Number of bytes that are left.
    Sized(u64),
    UntilClose,
    ChunkSize,
    ChunkData(u64),
    ChunkEnd,
    Trailers,
    Whole,
}

impl ResponseParser {
    /// Returns the status code; 0 before the head is complete.
    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// Returns whether the connection stays open after this response.
    pub(super) fn keep_alive(&self) -> bool {
        self.keep_alive
    }

    /// Adds received bytes. Returns whether the response is complete.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<bool, Malformed> {
        loop {
            match self.state {
                ParserState::Whole if bytes.is_empty() => return Ok(true),
                ParserState::Whole => return Err(Malformed::Surplus(bytes.len())),
                _ if bytes.is_empty() => return Ok(false),
                ParserState::UntilClose => return Ok(false),
                ParserState::Head => {
                    self.keep_partial(bytes)?;
                    return match self.parse_heads()? {
                        Some(start_of_body) => self.push(&start_of_body),
                        None => Ok(false),
                    };
                }
                ParserState::Sized(bytes_left) => {
                    let bytes_left = drop_front(&mut bytes, bytes_left);
                    self.state = if bytes_left == 0 { ParserState::Whole } else { ParserState::Sized(bytes_left) };
                }
                ParserState::ChunkData(bytes_left) => {
                    let bytes_left = drop_front(&mut bytes, bytes_left);
                    self.state =
                        if bytes_left == 0 { ParserState::ChunkEnd } else { ParserState::ChunkData(bytes_left) };
                }
                ParserState::ChunkSize | ParserState::ChunkEnd | ParserState::Trailers => {
                    let line_end = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |index| index + 1);
                    self.keep_partial(&bytes[..line_end])?;
                    bytes = &bytes[line_end..];
                    if self.partial.ends_with(b"\n") {
                        self.state = self.after_line()?;
                        self.partial.clear();
                    }
                }
            }
        }
    }

    /// Parses the complete heads in `partial`: a server may send any number of interim responses before the final
    /// response. After the final head, returns the received part of the body; `None` before that.
    fn parse_heads(&mut self) -> Result<Option<Vec<u8>>, Malformed> {
        let mut parsed_bytes = 0;
        while self.state == ParserState::Head {
            let Some((length, state)) = self.parse_head(parsed_bytes)? else {
                self.partial.drain(..parsed_bytes);
                return Ok(None);
            };
            parsed_bytes += length;
            self.state = state;
        }
        let start_of_body = self.partial.split_off(parsed_bytes);
        self.partial.clear();
        Ok(Some(start_of_body))
    }

    /// Ends the stream. Returns whether the response is complete.
    pub(super) fn end(&mut self) -> Result<bool, Malformed> {
        if self.state == ParserState::UntilClose {
            self.state = ParserState::Whole;
        }
        Ok(self.state == ParserState::Whole)
    }

    fn keep_partial(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        self.partial.extend_from_slice(bytes);
        let is_within_limit = matches!(self.state, ParserState::Head) || self.partial.len() <= MAX_HEAD_BYTES;
        if is_within_limit { Ok(()) } else { Err(Malformed::HeadTooLong) }
    }

    /// Parses the head that begins at `from` in `partial`. Returns its length and the next stage; `None` if it is
    /// incomplete.
    fn parse_head(&mut self, from: usize) -> Result<Option<(usize, ParserState)>, Malformed> {
        let unread = self.partial.get(from..).unwrap_or_default();
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let length = match head.parse(unread).map_err(Malformed::Head)? {
            Status::Complete(length) => length,
            Status::Partial if unread.len() > MAX_HEAD_BYTES => return Err(Malformed::HeadTooLong),
            Status::Partial => return Ok(None),
        };
        let status = head.code.unwrap_or(0);
        let state = match status {
            101 => return Err(Malformed::Upgrade),
            // This is an interim response. The final response follows.
            100..=199 => ParserState::Head,
            204 | 304 => ParserState::Whole,
            _ => body_of(head.headers)?,
        };
        let persistent = match head.version {
            Some(1) => !has_token(head.headers, "connection", "close"),
            _ => has_token(head.headers, "connection", "keep-alive"),
        };
        self.status = status;
        self.keep_alive = persistent && state != ParserState::UntilClose;
        Ok(Some((length, state)))
    }

    /// Returns the stage that follows the line in `partial`.
    fn after_line(&self) -> Result<ParserState, Malformed> {
        let line = self.partial.as_slice();
        match self.state {
            ParserState::ChunkSize => match parse_chunk_size(line) {
                Ok(Status::Complete((_, 0))) => Ok(ParserState::Trailers),
                Ok(Status::Complete((_, size))) => Ok(ParserState::ChunkData(size)),
                Ok(Status::Partial) | Err(_) => Err(Malformed::Chunk),
            },
            ParserState::ChunkEnd if matches!(line, b"\r\n" | b"\n") => Ok(ParserState::ChunkSize),
            ParserState::Trailers if matches!(line, b"\r\n" | b"\n") => Ok(ParserState::Whole),
            ParserState::Trailers => Ok(ParserState::Trailers),
            _ => Err(Malformed::Chunk),
        }
    }
}

/// Drops up to `left` bytes from the front. Returns how many of `left` are still to be received.
fn drop_front(bytes: &mut &[u8], left: u64) -> u64 {
    let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
    *bytes = &bytes[taken..];
    left - taken as u64
}

fn body_of(headers: &[Header<'_>]) -> Result<ParserState, Malformed> {
    if has_token(headers, "transfer-encoding", "chunked") {
        return Ok(ParserState::ChunkSize);
    }
    if values(headers, "transfer-encoding").next().is_some() {
        return Ok(ParserState::UntilClose);
    }
    let mut length = None;
    for text in values(headers, "content-length") {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Malformed::ContentLength);
        }
        let value: u64 = text.parse().map_err(|_| Malformed::ContentLength)?;
        if length.is_some_and(|other| other != value) {
            return Err(Malformed::ContentLength);
        }
        length = Some(value);
    }
    Ok(match length {
        None => ParserState::UntilClose,
        Some(0) => ParserState::Whole,
        Some(length) => ParserState::Sized(length),
    })
}

/// Iterates over the members of a header's comma-separated list, over all its lines.
fn values<'h>(headers: &'h [Header<'h>], name: &str) -> impl Iterator<Item = &'h str> {
    headers
        .iter()
        .filter(move |header| header.name.eq_ignore_ascii_case(name))
        .flat_map(|header| std::str::from_utf8(header.value).unwrap_or("").split(','))
        .map(str::trim)
}

fn has_token(headers: &[Header<'_>], name: &str, token: &str) -> bool {
    values(headers, name).any(|value| value.eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns status and `keep_alive` of a response that must be complete at its last byte and not before.
    fn whole(text: &str) -> (u16, bool) {
        let mut response = ResponseParser::default();
        let (last, front) = text.as_bytes().split_last().unwrap();
        assert_eq!(response.push(front), Ok(false), "{text}");
        assert_eq!(response.push(&[*last]), Ok(true), "{text}");
        (response.status(), response.keep_alive())
    }

    fn malformed(text: &str) -> Malformed {
        ResponseParser::default().push(text.as_bytes()).unwrap_err()
    }

    #[test]
    fn framings() {
        assert_eq!(whole("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), (200, true));
        assert_eq!(whole("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), (200, true));
        assert_eq!(whole("HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok"), (200, true));
        assert_eq!(whole("HTTP/1.1 204 No Content\r\n\r\n"), (204, true));
        assert_eq!(whole("HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n"), (304, true));
        assert_eq!(whole("HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 404 No\r\ncontent-length: 1\r\n\r\nx"), (404, true));
        assert_eq!(whole("HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\nx"), (200, false));
        assert_eq!(whole("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx"), (200, false));
        assert_eq!(whole("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx"), (200, true));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n";
        assert_eq!(whole(&format!("{chunked}5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\nT: 1\r\n\r\n")), (200, true));
    }

    #[test]
    fn interim_responses_without_end_are_passed_over() {
        let mut response = ResponseParser::default();
        assert_eq!(response.push("HTTP/1.1 100 \r\n\r\n".repeat(100_000).as_bytes()), Ok(false));
        assert_eq!(response.push(b"HTTP/1.1 204 No Content\r\n\r\n"), Ok(true));
        assert_eq!(response.status(), 204);
    }

    #[test]
    fn a_body_without_length_ends_with_the_connection() {
        let mut response = ResponseParser::default();
        assert_eq!(response.push(b"HTTP/1.1 200 OK\r\n\r\nhello"), Ok(false));
        assert_eq!(response.end(), Ok(true));
        assert!(!response.keep_alive());
    }

    #[test]
    fn a_body_cut_short_is_not_whole() {
        let mut response = ResponseParser::default();
        assert_eq!(response.push(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello"), Ok(false));
        assert_eq!(response.end(), Ok(false));
    }

    #[test]
    fn malformed_responses() {
        assert!(matches!(malformed("SSH-2.0-OpenSSH_9.2\r\n"), Malformed::Head(_)));
        assert_eq!(malformed("HTTP/1.1 101 Switching\r\n\r\n"), Malformed::Upgrade);
        assert_eq!(malformed("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), Malformed::ContentLength);
        assert_eq!(malformed("HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n"), Malformed::ContentLength);
        assert_eq!(malformed("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxyz"), Malformed::Surplus(2));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(malformed(&format!("{chunked}zz\r\n")), Malformed::Chunk);
        assert_eq!(malformed(&format!("{chunked}1\r\nxy\r\n")), Malformed::Chunk);
        let endless = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(MAX_HEAD_BYTES));
        assert_eq!(malformed(&endless), Malformed::HeadTooLong);
        assert_eq!(malformed(&format!("{chunked}{}", "0".repeat(MAX_HEAD_BYTES + 1))), Malformed::HeadTooLong);
    }

    proptest! {
        #[test]
        fn how_the_bytes_are_cut_does_not_matter(
            chunks in prop::collection::vec(1_usize..300, 0..5),
            cuts in prop::collection::vec(1_usize..40, 1..20),
        ) {
            let body: String = chunks.iter().map(|size| format!("{size:x}\r\n{}\r\n", "\n".repeat(*size))).collect();
            let text = format!(
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}0\r\nA: b\r\n\r\n"
            );
            let mut response = ResponseParser::default();
            let mut rest = text.as_bytes();
            for cut in cuts.iter().cycle() {
                let (piece, later) = rest.split_at((*cut).min(rest.len()));
                rest = later;
                prop_assert_eq!(response.push(piece), Ok(rest.is_empty()));
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(response.status(), 200);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), chunked in any::<bool>()) {
            let mut response = ResponseParser::default();
            if chunked {
                let _ = response.push(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            }
            let _ = response.push(&bytes);
            let _ = response.end();
        }
    }
}
