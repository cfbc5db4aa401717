//! Builds frames of pages, and compresses them in threads of their own.
//!
//! A *frame* is up to 1024 pages, stored together after a *directory* that has a *record* for each page
//! ([`crate::format::segment`]).

use crate::engine::Frame;
use crate::format::page::Packer;
use crate::format::segment::{FRAME_HEADER_LEN, MAX_FRAME_PAGES, RECORD_LEN, Record};
use rekindle_kernel::large::{HUGE, Large};
use rekindle_pages::PAGE_SIZE;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, PoisonError};

/// Limit of pages with content in a frame. With its header and directory, the frame fits into a huge page.
const MAX_STORED_PAGES: usize = 507;
/// Bytes before the first page of a frame that is being built: space for the longest directory.
const DIRECTORY_SPACE: usize = FRAME_HEADER_LEN + MAX_FRAME_PAGES * RECORD_LEN;
const _: () = assert!(DIRECTORY_SPACE + MAX_STORED_PAGES * PAGE_SIZE <= HUGE);

/// A frame that is being built. Its pages follow the first [`DIRECTORY_SPACE`] bytes without gaps.
#[derive(Debug)]
pub(crate) struct FrameBuilder {
    /// A record's `len` is 0 for a page of zeroes, which has no content in the frame.
    pub records: Vec<Record>,
    pub frame: Frame,
}

impl FrameBuilder {
    pub fn new(mut frame: Frame) -> Self {
        frame.bytes.clear();
        frame.bytes.grow(DIRECTORY_SPACE);
        Self { records: Vec::with_capacity(MAX_FRAME_PAGES), frame }
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.records.clear();
        self.frame.bytes.truncate(DIRECTORY_SPACE);
    }

    /// Returns the number of pages that still fit.
    pub fn free_pages(&self) -> usize {
        let pages = self.frame.bytes.len().saturating_sub(DIRECTORY_SPACE) / PAGE_SIZE;
        MAX_STORED_PAGES.saturating_sub(pages).min(MAX_FRAME_PAGES.saturating_sub(self.records.len()))
    }
}

/// Job of a packer: pack the frame, then send it.
#[derive(Debug)]
pub(crate) struct PackJob {
    pub frame: FrameBuilder,
    pub send_packed: Sender<Frame>,
}

/// Packs frames until there are no more jobs. Several threads share the receiver.
pub(crate) fn pack_all(jobs: &Mutex<Receiver<PackJob>>) {
    let mut packer = Packer::default();
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(PackJob { frame, send_packed }) = job else { return };
        let _ = send_packed.send(pack(&mut packer, frame));
    }
}

/// Compresses the pages in place, and writes the directory in front of them.
fn pack(packer: &mut Packer, builder: FrameBuilder) -> Frame {
    let FrameBuilder { mut records, mut frame } = builder;
    frame.count = records.len();
    frame.start = DIRECTORY_SPACE - FRAME_HEADER_LEN - RECORD_LEN * frame.count.min(MAX_FRAME_PAGES);
    compress_pages(packer, &mut records, &mut frame.bytes);
    let front = frame.bytes.get_mut(frame.start..DIRECTORY_SPACE).unwrap_or_default();
    let (header, directory) = front.split_at_mut_checked(FRAME_HEADER_LEN).unwrap_or_default();
    header.fill(0);
    for (encoded, record) in directory.as_chunks_mut::<RECORD_LEN>().0.iter_mut().zip(&records) {
        *encoded = record.encode();
    }
    frame
}

/// Compresses the pages after the first [`DIRECTORY_SPACE`] bytes, and sets the stored length in their records.
fn compress_pages(packer: &mut Packer, records: &mut [Record], bytes: &mut Large) {
    let (mut read_at, mut write_at) = (DIRECTORY_SPACE, DIRECTORY_SPACE);
    for record in records.iter_mut().filter(|record| record.len != 0) {
        let Some(page) = bytes.get(read_at..).and_then(|unread| unread.first_chunk::<PAGE_SIZE>()) else { break };
        // The stored bytes are never longer than the page, so they end before the next page.
        match packer.pack(page) {
            Some(stored) => {
                record.len = stored.len() as u16;
                if let Some(target) = bytes.get_mut(write_at..write_at + stored.len()) {
                    target.copy_from_slice(stored);
                }
            }
            None if read_at != write_at => bytes.copy_within(read_at..read_at + PAGE_SIZE, write_at),
            None => {}
        }
        read_at += PAGE_SIZE;
        write_at += usize::from(record.len);
    }
    bytes.truncate(write_at);
}
