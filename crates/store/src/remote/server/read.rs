//! Serves a client that reads a checkpoint.

use super::Timeouts;
use super::answer::{ServeResult, fail, refuse};
use crate::format::codec::Reader;
use crate::image::{LocalHotPages, LocalImage};
use crate::remote::connection::Connection;
use crate::remote::protocol::{
    Kind, MAX_PAGES_PER_REQUEST, SectionCode, Welcome, decode_ids, encode_ids, encode_stored,
};

/// Serves a client that has opened the checkpoint `image`.
pub(super) fn serve(connection: &mut Connection, image: &LocalImage, timeouts: Timeouts) -> ServeResult {
    let store = image.store();
    let info = image.info();
    let welcome =
        Welcome { id: store.id, vm: store.vm.clone(), epoch: info.epoch, newest: info.number, info: Some(info) };
    connection.send_json(Kind::Welcome, &welcome)?;
    connection.set_max_silence(timeouts.idle);
    let mut server = ReadServer { connection, image, hot_pages: None, position: 0 };
    while let Some((kind, payload)) = server.connection.receive()? {
        match kind {
            Kind::Read => server.send_pages(&payload)?,
            Kind::Digests => server.send_digests(&payload)?,
            Kind::Hot => server.send_order(&payload)?,
            Kind::Section => server.send_section(&payload)?,
            other => return refuse(server.connection, &format!("{other:?} from a client that reads")),
        }
    }
    Ok(())
}

struct ReadServer<'a> {
    connection: &'a mut Connection,
    image: &'a LocalImage,
    /// Nonzero pages, the most recently written first, from number `position` of this order on.
    hot_pages: Option<LocalHotPages<'a>>,
    position: u64,
}

impl ReadServer<'_> {
    fn send_pages(&mut self, payload: &[u8]) -> ServeResult {
        let Some(ids) = decode_ids(payload) else {
            return refuse(self.connection, "a request for pages that cannot be read");
        };
        match self.image.read_stored(&ids) {
            Ok(pages) => self.connection.send(Kind::Stored, &[&encode_stored(&pages)]),
            Err(e) => fail(self.connection, &e),
        }
    }

    fn send_digests(&mut self, payload: &[u8]) -> ServeResult {
        let Some(ids) = decode_ids(payload) else {
            return refuse(self.connection, "a request for digests that cannot be read");
        };
        match self.image.digests(&ids) {
            Ok(digests) => {
                let bytes: Vec<u8> = digests.into_iter().flat_map(u64::to_le_bytes).collect();
                self.connection.send(Kind::Bytes, &[&bytes])
            }
            Err(e) => fail(self.connection, &e),
        }
    }

    /// Sends the next pages of the order from the requested position on.
    fn send_order(&mut self, payload: &[u8]) -> ServeResult {
        let Some(requested) = Reader::new(payload).u64() else {
            return refuse(self.connection, "a request for an order that cannot be read");
        };
        if requested != self.position {
            self.hot_pages = None;
        }
        let hot_pages = match &mut self.hot_pages {
            Some(hot_pages) => hot_pages,
            None => match self.image.hot() {
                Ok(hot_pages) => {
                    self.position = 0;
                    self.hot_pages.insert(hot_pages)
                }
                Err(e) => return fail(self.connection, &e),
            },
        };
        let skipped = usize::try_from(requested - self.position).unwrap_or(usize::MAX);
        let ids: Vec<_> = hot_pages.skip(skipped).take(MAX_PAGES_PER_REQUEST).collect();
        self.position = requested + ids.len() as u64;
        self.connection.send(Kind::Order, &[&encode_ids(&ids)])
    }

    fn send_section(&mut self, payload: &[u8]) -> ServeResult {
        let Some(section) = SectionCode::decode(payload) else {
            return refuse(self.connection, "a request for a section that is not known");
        };
        match self.image.section(section) {
            Ok(bytes) => self.connection.send(Kind::Bytes, &[&bytes]),
            Err(e) => fail(self.connection, &e),
        }
    }
}
