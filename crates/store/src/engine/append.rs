//! Appends pages of the open checkpoint to segments, and starts to write them to the disk.
//!
//! Pages arrive in *frames*: a header, a directory with a *record* for each page, and the pages. A *segment* is a file
//! of frames. The *open* checkpoint is the one that is being written.

use super::pool::{PlainFrame, Role, Segment, WrittenFrame};
use super::{Engine, OpenCheckpoint, PendingPage};
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::manifest::SegmentExtent;
use crate::format::names;
use crate::format::segment::{self, FRAME_HEADER_LEN, FrameHeader, Kind, RECORD_LEN, Record};
use crate::sealing::{FileIdentity, TAG_LEN};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_pages::PageNo;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit of segments with unsynced pages, because the kernel keeps these pages in memory.
const MAX_DIRTY_SEGMENTS: usize = 4;

impl Engine {
    /// Appends a frame to the open checkpoint. The frame consists of [`FRAME_HEADER_LEN`] free bytes, the directory of
    /// `count` pages, and their content. [`Engine::commit`] returns any error.
    pub fn append(&mut self, frame: &mut [u8], count: usize) {
        let started_at = Instant::now();
        let Some(mut checkpoint) = self.checkpoint.take() else { return };
        if checkpoint.failure.is_none() {
            let syncing_before = checkpoint.syncing;
            checkpoint.failure = self.append_to(&mut checkpoint, frame, count).err();
            checkpoint.writing += started_at.elapsed().saturating_sub(checkpoint.syncing - syncing_before);
        }
        self.checkpoint = Some(checkpoint);
    }

    fn append_to(&mut self, checkpoint: &mut OpenCheckpoint, frame: &mut [u8], count: usize) -> Result<()> {
        let records = check_frame(checkpoint, frame, count).map_err(|what| self.bad_blocks(what))?;
        let data_at = FRAME_HEADER_LEN + count * RECORD_LEN;
        let data_len = (frame.len() - data_at) as u32;
        let number = self.newest() + 1;
        let header = FrameHeader { kind: Kind::Pages, count: count as u32, data_len, is_sealed: false, number };
        header.finish(frame);
        // Also the space for the tags of an encrypted frame.
        let max_len = (frame.len() + (count + 1) * TAG_LEN) as u64;
        self.make_room(checkpoint, max_len)?;
        let position = self.choose_segment(checkpoint, max_len)?;
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        if !checkpoint.written_segments.contains(&position) {
            checkpoint.written_segments.push(position);
        }
        let frame = PlainFrame { header, records, bytes: frame };
        let written = segment.write_frame(frame, &mut self.sealed_frame);
        let failed = |e| StoreError::io(self.store.disk.name(), &segment.name(), "writing pages", e);
        let WrittenFrame { offset, header, records } = written.map_err(failed)?;
        checkpoint.bytes += segment.next_frame_offset() - offset;
        self.add_pending(checkpoint, &records, position, offset, header.data_offset());
        Ok(())
    }

    /// Adds the pages of a frame, which was written at `frame_offset` of a segment and whose content begins at
    /// `data_offset` of the frame, to the open checkpoint.
    fn add_pending(
        &self,
        checkpoint: &mut OpenCheckpoint,
        records: &[Record],
        segment: usize,
        frame_offset: u64,
        data_offset: usize,
    ) {
        let mut record_offset = frame_offset + FRAME_HEADER_LEN as u64;
        let mut data_offset = frame_offset + data_offset as u64;
        for record in records {
            // A page of zeroes has no content; its record gives it a location.
            let offset = if record.len == 0 { record_offset } else { data_offset };
            let location = Location::new(segment, offset, record.len);
            record_offset += RECORD_LEN as u64;
            data_offset += u64::from(record.len);
            let Some(block) = self.blocks.iter().position(|state| state.stored.number == record.block) else {
                continue;
            };
            let page = PageNo(record.page.into());
            let is_first = checkpoint.appended.get_mut(block).is_some_and(|appended| appended.insert(page));
            checkpoint.has_duplicates |= !is_first;
            let Record { page, digest, .. } = *record;
            checkpoint.pending.push(PendingPage { block: block as u16, page, location, digest });
            if record.len == 0 {
                checkpoint.pages.zero += 1;
            } else {
                checkpoint.pages.stored += 1;
                checkpoint.pages.compressed += u64::from(record.len);
            }
        }
    }

    /// Returns the position of the segment to which the next `len` bytes are appended.
    fn choose_segment(&mut self, checkpoint: &mut OpenCheckpoint, len: u64) -> Result<usize> {
        let max_bytes = self.max_segment_bytes(checkpoint.ram_bytes());
        if let Some(position) = self.active
            && let Some(segment) = self.pool.get(position)
            && segment.is_sound
            && segment.file.is_some()
            && segment.next_frame_offset() + len <= max_bytes
        {
            return Ok(position);
        }
        if let Some(file) = self.active.take().and_then(|full| self.pool.get(full)?.file.clone()) {
            file.start_sync();
        }
        self.sync_oldest_segments(checkpoint)?;
        let position = self.create_segment(Role::Data)?;
        checkpoint.has_new_segments = true;
        checkpoint.written_segments.push(position);
        checkpoint.bytes += segment::HEADER_LEN;
        self.active = Some(position);
        Ok(position)
    }

    /// Syncs segments until one more may become dirty. Syncing early keeps the commit of a large checkpoint short, and
    /// unsynced pages out of the kernel's page cache.
    fn sync_oldest_segments(&mut self, checkpoint: &mut OpenCheckpoint) -> Result<()> {
        let is_dirty = |position: &usize| self.pool.get(*position).is_some_and(|segment| segment.is_dirty);
        let dirty: Vec<usize> = checkpoint.written_segments.iter().copied().filter(is_dirty).collect();
        let surplus = (dirty.len() + 1).saturating_sub(MAX_DIRTY_SEGMENTS);
        for position in dirty.into_iter().take(surplus) {
            self.sync_segment(position, &mut checkpoint.syncing)?;
        }
        Ok(())
    }

    /// Creates a new segment, which no manifest lists yet. Returns its position.
    pub(super) fn create_segment(&mut self, role: Role) -> Result<usize> {
        let (epoch, number) = (self.claim.epoch, self.next_segment);
        let name = names::segment(epoch, number);
        self.next_segment += 1;
        let (seal, key) = self.store.create_key(FileIdentity::Segment { epoch, number }, &name)?.unzip();
        let extent = SegmentExtent { epoch, number, len: 0, seal: seal.map(|seal| seal.id()) };
        let file: Arc<dyn DurableFile> =
            self.store.disk.create(&name).map_err(self.store.failed(&name, "creating a segment"))?;
        let header = segment::encode_header(self.store.id, epoch, number, seal);
        let written = file.write_at(&header, 0).map_err(self.store.failed(&name, "writing its header"));
        let added = written.and_then(|()| {
            let full = self.bad_blocks("it has too many segments");
            self.pool.add(Segment::new(extent, role, file, key)).ok_or(full)
        });
        if added.is_err() {
            let _ = self.store.disk.remove(&name);
        }
        added
    }

    /// Makes the written part of a segment durable. Closes the file if nothing more is appended to the segment.
    pub(super) fn sync_segment(&mut self, position: usize, sync_time: &mut Duration) -> Result<()> {
        let is_active = self.active == Some(position);
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let started_at = Instant::now();
        let synced = segment.file.as_ref().map_or(Ok(()), |file| file.sync());
        *sync_time += started_at.elapsed();
        if let Err(e) = synced {
            // After a failed sync, the kernel may drop the data and report success for the next sync.
            segment.is_sound = false;
            return Err(StoreError::io(self.store.disk.name(), &segment.name(), "making pages durable", e));
        }
        segment.is_dirty = false;
        // A segment with committed content stays open, so that an abort can truncate it to that content.
        if !is_active && segment.extent.len == 0 {
            segment.file = None;
        }
        Ok(())
    }
}

/// Checks a frame of pages, and returns the records of its directory.
///
/// # Errors
/// A text that describes what is wrong.
fn check_frame(
    checkpoint: &OpenCheckpoint,
    frame: &[u8],
    count: usize,
) -> std::result::Result<Vec<Record>, &'static str> {
    let data_at = FRAME_HEADER_LEN + count * RECORD_LEN;
    let data_len = frame.len().saturating_sub(data_at);
    if count > segment::MAX_FRAME_PAGES || data_len > segment::MAX_FRAME_DATA_BYTES || frame.len() < data_at {
        return Err("a frame of pages is too long");
    }
    let directory = frame.get(FRAME_HEADER_LEN..data_at).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
    let records: Vec<Record> = directory.iter().map(|bytes| Record::decode(*bytes)).collect();
    for record in &records {
        if checkpoint.block(record.block).is_none_or(|block| u64::from(record.page) >= block.pages()) {
            return Err("a page is outside of its block");
        }
        if !record.is_plausible(0) {
            return Err("a page has an impossible length or digest");
        }
    }
    if records.iter().map(|record| usize::from(record.len)).sum::<usize>() != data_len {
        return Err("the lengths of a frame's pages do not add up");
    }
    Ok(records)
}
