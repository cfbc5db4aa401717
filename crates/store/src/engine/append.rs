//! Appends pages of the open checkpoint to segments, and starts to write them to the disk.

use super::pool::{Role, Segment};
use super::{Engine, Flight, MAX_DIRTY, Pending, SEGMENT_MAX, SEGMENT_MIN};
use crate::disk::DiskFile;
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::manifest::Extent;
use crate::format::names;
use crate::format::segment::{self, FRAME_HEADER_LEN, FrameHeader, Kind, RECORD_LEN, Record};
use rekindle_pages::{PAGE_SIZE, PageNo};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Engine {
    /// Appends a frame to the open checkpoint. The frame consists of [`FRAME_HEADER_LEN`] free bytes, the directory of
    /// `count` pages, and their content. [`Engine::commit`] returns any error.
    pub fn append(&mut self, frame: &mut [u8], count: usize) {
        let began = Instant::now();
        let Some(mut flight) = self.flight.take() else { return };
        if flight.failed.is_none() {
            let waited = flight.syncing;
            flight.failed = self.append_to(&mut flight, frame, count).err();
            flight.writing += began.elapsed().saturating_sub(flight.syncing - waited);
        }
        self.flight = Some(flight);
    }

    fn append_to(&mut self, flight: &mut Flight, frame: &mut [u8], count: usize) -> Result<()> {
        let data_at = FRAME_HEADER_LEN + count * RECORD_LEN;
        let data_len = frame.len().saturating_sub(data_at);
        let number = self.newest() + 1;
        let header = FrameHeader { kind: Kind::Pages, count: count as u32, data_len: data_len as u32, number };
        let wrong = |what: &str| StoreError::Blocks { store: self.home.name().into(), what: what.into() };
        if count > segment::FRAME_RECORDS || data_len > segment::FRAME_DATA || frame.len() < data_at {
            return Err(wrong("a frame of pages is too long"));
        }
        let records = frame.get(FRAME_HEADER_LEN..data_at).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        let mut total = 0;
        for record in records.iter().map(|bytes| Record::decode(*bytes)) {
            let block = flight.table.iter().find(|(number, _)| *number == record.block);
            if block.is_none_or(|(_, block)| u64::from(record.page) >= block.pages()) {
                return Err(wrong("a page is outside of its block"));
            }
            if usize::from(record.len) > PAGE_SIZE || (record.len == 0) != (record.digest == 0) {
                return Err(wrong("a page has an impossible length or digest"));
            }
            total += usize::from(record.len);
        }
        if total != data_len {
            return Err(wrong("the lengths of a frame's pages do not add up"));
        }
        header.seal(frame);
        self.make_room(flight, frame.len() as u64)?;
        let position = self.place_for(flight, frame.len() as u64)?;
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let at = segment.next();
        let name = names::segment(segment.extent.epoch, segment.extent.number);
        segment.dirty = true;
        if !flight.touched.contains(&position) {
            flight.touched.push(position);
        }
        if let Some(file) = &segment.file {
            file.write_at(frame, at).map_err(|e| StoreError::io(self.home.disk.name(), &name, "writing pages", e))?;
            file.start_writeback(at, frame.len() as u64);
        }
        segment.end = at + frame.len() as u64;
        flight.bytes += segment.end.next_multiple_of(4096) - at;
        let mut data = at + data_at as u64;
        let records = frame.get(FRAME_HEADER_LEN..data_at).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
        for (record, n) in records.iter().map(|bytes| Record::decode(*bytes)).zip(0u64..) {
            let own = at + FRAME_HEADER_LEN as u64 + n * RECORD_LEN as u64;
            let place = Location::new(position, if record.len == 0 { own } else { data }, record.len);
            data += u64::from(record.len);
            let Some(block) = self.blocks.iter().position(|state| state.number == record.block) else { continue };
            let first = flight.sent.get_mut(block).is_some_and(|sent| sent.insert(PageNo(record.page.into())));
            flight.duplicates |= !first;
            flight.pending.push(Pending { block: block as u16, page: record.page, place, digest: record.digest });
            if record.len == 0 {
                flight.pages.zero += 1;
            } else {
                flight.pages.stored += 1;
                flight.pages.compressed += u64::from(record.len);
            }
        }
        Ok(())
    }

    /// Returns the position of the segment to which the next `len` bytes are appended.
    fn place_for(&mut self, flight: &mut Flight, len: u64) -> Result<usize> {
        let most = self.segment_len_of(flight);
        if let Some(position) = self.active
            && let Some(segment) = self.pool.get(position)
            && segment.sound
            && segment.file.is_some()
            && segment.next() + len <= most
        {
            return Ok(position);
        }
        self.active = None;
        // Syncs early, so that the commit of a large checkpoint is short and few unsynced pages use the kernel's page
        // cache.
        let dirty: Vec<_> =
            flight.touched.iter().copied().filter(|p| self.pool.get(*p).is_some_and(|s| s.dirty)).collect();
        for position in dirty.iter().take((dirty.len() + 1).saturating_sub(MAX_DIRTY)) {
            self.sync_segment(*position, &mut flight.syncing)?;
        }
        let position = self.make_segment(Role::Data)?;
        flight.made = true;
        flight.touched.push(position);
        flight.bytes += segment::HEADER_LEN;
        self.active = Some(position);
        Ok(position)
    }

    pub(super) fn segment_len_of(&self, flight: &Flight) -> u64 {
        match self.settings.segment {
            0 => {
                let pages: u64 = flight.table.iter().map(|(_, block)| block.pages()).sum();
                (pages * PAGE_SIZE as u64 / 32).next_multiple_of(4096).clamp(SEGMENT_MIN, SEGMENT_MAX)
            }
            set => set,
        }
    }

    /// Creates a new segment, which no manifest lists yet. Returns its position.
    pub(super) fn make_segment(&mut self, role: Role) -> Result<usize> {
        let extent = Extent { epoch: self.claim.epoch, number: self.next_segment, len: 0 };
        let name = names::segment(extent.epoch, extent.number);
        self.next_segment += 1;
        let file: Arc<dyn DiskFile> =
            self.home.disk.create(&name).map_err(self.home.failed(&name, "creating a segment"))?;
        let header = segment::encode_header(self.home.id, extent.epoch, extent.number);
        let written = file.write_at(&header, 0).map_err(self.home.failed(&name, "writing its header"));
        let added = written.and_then(|()| {
            let what = "it has too many segments".to_owned();
            let full = StoreError::Blocks { store: self.home.name().into(), what };
            self.pool.add(Segment::new(extent, role, file)).ok_or(full)
        });
        if added.is_err() {
            let _ = self.home.disk.remove(&name);
        }
        added
    }

    /// Makes the written part of a segment durable. Closes the file if nothing more is appended to the segment.
    pub(super) fn sync_segment(&mut self, position: usize, waited: &mut Duration) -> Result<()> {
        let active = self.active == Some(position);
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let began = Instant::now();
        let synced = segment.file.as_ref().map_or(Ok(()), |file| file.sync());
        *waited += began.elapsed();
        if let Err(e) = synced {
            // After a failed sync, the kernel may drop the data and report success for the next sync.
            segment.sound = false;
            let name = names::segment(segment.extent.epoch, segment.extent.number);
            return Err(StoreError::io(self.home.disk.name(), &name, "making pages durable", e));
        }
        segment.dirty = false;
        // A segment with committed content stays open, so that an abort can truncate it to that content.
        if !active && segment.extent.len == 0 {
            segment.file = None;
        }
        Ok(())
    }
}
