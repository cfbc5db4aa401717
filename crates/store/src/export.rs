//! Converts a checkpoint to a migration stream that stock QEMU loads, and back.

use crate::error::StoreError;
use crate::reader::Image;
use crate::types::{Block, Committed};
use crate::writer::Writer;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_qemu::incoming::{Incoming, IncomingError, IncomingPage};
use rekindle_qemu::stream::{self, RamSection, StreamError};
use serde_json::{Value, json};
use std::io::{self, Read, Write};

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The stored device state is not a valid stream.
    #[error("the device state of checkpoint {number} cannot be exported")]
    Devices {
        number: u64,
        #[source]
        source: StreamError,
    },
    /// Writing the output failed.
    #[error("the stream cannot be written")]
    Write(#[source] io::Error),
    /// The input is not a migration stream that [`import`] can read.
    #[error(transparent)]
    Incoming(#[from] IncomingError),
}

/// Writes a checkpoint as a migration stream: all pages of all RAM blocks, then the device state. `machine` is required
/// if the destination QEMU was started without `-global migration.send-configuration=off`. `progress` gets the bytes of
/// RAM done and in total. Returns the number of bytes written.
///
/// # Errors
/// [`ExportError::Store`] if the store cannot be read; a damaged page is named. [`ExportError::Devices`];
/// [`ExportError::Write`]. QEMU rejects the incomplete stream that is left.
pub fn export(
    image: &Image,
    out: &mut dyn Write,
    machine: Option<&str>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ExportError> {
    out.write_all(&stream::HEADER).map_err(ExportError::Write)?;
    Ok(stream::HEADER.len() as u64 + export_body(image, out, machine, progress)?)
}

/// Does the same as [`export`] without [`stream::HEADER`].
///
/// # Errors
/// As [`export`].
pub fn export_body(
    image: &Image,
    out: &mut dyn Write,
    machine: Option<&str>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ExportError> {
    let number = image.info().number;
    let state = image.devices()?;
    let devices = stream::check(&state).map_err(|source| ExportError::Devices { number, source })?;
    let blocks = &image.info().blocks;
    let total = blocks.iter().map(|block| block.used).sum();
    let mut written = 0;
    let mut buffer = Vec::new();
    let mut flush = |buffer: &mut Vec<u8>| {
        written += buffer.len() as u64;
        let done = out.write_all(buffer).map_err(ExportError::Write);
        buffer.clear();
        done
    };
    if let Some(machine) = machine {
        stream::configuration(&mut buffer, machine);
    }
    let sizes = blocks.iter().filter(|block| block.used > 0).map(|block| (block.id.as_str(), block.used));
    let mut section = RamSection::start_plain(&mut buffer, sizes);
    let mut done = 0;
    for (block, id) in blocks.iter().zip((0..).map(BlockId)) {
        let mut first = 0;
        while first < block.pages() {
            let end = block.pages().min(first + 1024);
            image.read_pages(id, PageNo(first)..PageNo(end), |page, content| {
                section.page(&mut buffer, &block.id, page.offset(), content);
            })?;
            flush(&mut buffer)?;
            done += (end - first) * PAGE_SIZE as u64;
            progress(done.min(total), total);
            first = end;
        }
    }
    section.end(&mut buffer);
    buffer.extend_from_slice(devices);
    flush(&mut buffer)?;
    out.flush().map_err(ExportError::Write)?;
    Ok(written)
}

/// Reads a migration stream, from [`export`] or QEMU, into a store as its next checkpoint. `progress` gets the number
/// of pages that were read.
///
/// # Errors
/// [`ExportError::Incoming`] if the input is not a known stream; the store is unchanged then. [`ExportError::Store`] if
/// the checkpoint cannot be committed.
pub fn import(
    writer: &mut Writer,
    from: impl Read,
    definition: &Value,
    progress: &mut dyn FnMut(u64),
) -> Result<Committed, ExportError> {
    let mut incoming = Incoming::open(from)?;
    let block =
        |(id, used): &(String, u64)| Block { id: id.clone(), used: *used, max: *used, page_size: PAGE_SIZE as u64 };
    let blocks: Vec<Block> = incoming.blocks().iter().map(block).collect();
    let metadata = json!({"imported": true, "machine": incoming.machine()});
    let mut checkpoint = writer.begin(&blocks)?;
    let mut pages = 0;
    while let Some(IncomingPage { block, page, content }) = incoming.next_page()? {
        checkpoint.pages(BlockId(block), [(PageNo(page), content)])?;
        pages += 1;
        if pages % 1024 == 0 {
            progress(pages);
        }
    }
    let devices = incoming.devices()?;
    Ok(checkpoint.commit(definition, &metadata, &devices)?)
}
