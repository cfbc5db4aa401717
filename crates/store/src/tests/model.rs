//! A simple model of a store's content, and a driver that applies the same changes to the store and the model.

use super::disk::TestDisk;
use crate::directory::StoreDirectory;
use crate::engine::{CheckpointState, Engine, EngineSettings};
use crate::error::{Result, StoreError};
use crate::format::page::Packer;
use crate::format::segment::{FRAME_HEADER_LEN, Record};
use crate::image::LocalImage;
use crate::types::{Block, Committed, OnlyIf, Owner, Vm};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use uuid::Uuid;

pub fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(0xabc), name: "web".into() }
}

pub fn block(id: &str, pages: u64) -> Block {
    Block { id: id.into(), used: pages * PAGE_SIZE as u64, max: pages * 2 * PAGE_SIZE as u64, page_size: 4096 }
}

/// Returns a page: zero for kind 0, compressible for even kinds, incompressible for odd kinds.
pub fn content(kind: u64) -> Page {
    static MADE: [OnceLock<Page>; 64] = [const { OnceLock::new() }; 64];
    match MADE.get(kind as usize) {
        Some(has_new_segments) => *has_new_segments.get_or_init(|| make(kind)),
        None => make(kind),
    }
}

fn make(kind: u64) -> Page {
    let mut state = kind.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::array::from_fn(|n| match kind {
        0 => 0,
        kind if kind % 2 == 0 => (kind as usize * 7 + n / 64) as u8,
        _ => {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        }
    })
}

/// Expected content of a checkpoint: the blocks with the kinds of their pages, and the device state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expected {
    pub blocks: Vec<(Block, BTreeMap<u64, u64>)>,
    pub devices: Vec<u8>,
}

/// A step of a history: the blocks after it, and the pages that it writes.
#[derive(Debug, Clone, Default)]
pub struct Change {
    /// Name and number of pages of each block.
    pub blocks: Vec<(&'static str, u64)>,
    /// Position of the block, page, kind of content.
    pub pages: Vec<(usize, u64, u64)>,
}

/// The checkpoints that a writer should have written.
#[derive(Debug, Clone, Default)]
pub struct Model {
    pub checkpoints: BTreeMap<u64, Expected>,
    pub keep: u32,
    pub held: Option<u64>,
}

pub fn open(disk: &impl TestDisk, keep: u32) -> Result<Engine> {
    open_as(disk, keep, "test", None)
}

/// Returns the old epoch, the new epoch and the owner's operation of a [`StoreError::Superseded`].
pub fn owner_of(error: &StoreError) -> Option<(u64, u64, &str)> {
    match error {
        StoreError::Superseded { mine, epoch, owner, .. } => Some((*mine, *epoch, &owner.operation)),
        _ => None,
    }
}

pub fn open_as(disk: &impl TestDisk, keep: u32, operation: &str, only_if: Option<u64>) -> Result<Engine> {
    let settings = EngineSettings { keep, segment: 48 << 10, create: true };
    Engine::open(disk.shared(), &vm(), &Owner::here(operation), only_if.map(OnlyIf::Epoch), settings)
}

pub fn image(disk: &impl TestDisk, at: Option<u64>) -> Result<LocalImage> {
    LocalImage::open(StoreDirectory::open(disk.shared(), Some(vm().uuid))?, at)
}

pub fn lazy(disk: &impl TestDisk, at: Option<u64>) -> Result<LocalImage> {
    LocalImage::open_lazily(StoreDirectory::open(disk.shared(), Some(vm().uuid))?, at)
}

/// Sends pages to an engine in several frames.
pub fn send(engine: &mut Engine, pages: &[(u16, u64, u64)]) {
    let digester = engine.opened().digester;
    let mut packer = Packer::default();
    // Small frames find more errors; large frames waste less time.
    for some in pages.chunks(if pages.len() > 100 { 256 } else { 5 }) {
        let mut frame = vec![0; FRAME_HEADER_LEN + 16 * some.len()];
        for (n, (block, page, kind)) in some.iter().enumerate() {
            let content = content(*kind);
            let digest = digester.digest(&content);
            let stored: &[u8] = if digest == 0 { &[] } else { packer.pack(&content).unwrap_or(&content) };
            frame.extend_from_slice(stored);
            let record = Record { digest, page: *page as u32, len: stored.len() as u16, block: *block };
            frame[FRAME_HEADER_LEN + 16 * n..][..16].copy_from_slice(&record.encode());
        }
        engine.append(&mut frame, some.len());
    }
}

impl Model {
    pub fn newest(&self) -> u64 {
        self.checkpoints.keys().next_back().copied().unwrap_or(0)
    }

    /// Returns the checkpoint expected after `change`.
    pub fn after(&self, change: &Change) -> Expected {
        let before = self.checkpoints.values().next_back();
        let mut expected = Expected { devices: vec![(self.newest() + 1) as u8; 3000], ..Expected::default() };
        for (id, pages) in &change.blocks {
            let old = before.and_then(|before| before.blocks.iter().find(|(block, _)| block.id == *id));
            let mut content = old.map(|(_, content)| content.clone()).unwrap_or_default();
            content.retain(|page, _| page < pages);
            expected.blocks.push((block(id, *pages), content));
        }
        for (block, page, kind) in &change.pages {
            if let Some((_, content)) = expected.blocks.get_mut(*block) {
                content.insert(*page, *kind);
            }
        }
        expected
    }

    /// Commits `change` with the engine as the next checkpoint, and records it in the model.
    pub fn commit(&mut self, engine: &mut Engine, change: &Change) -> Result<Committed> {
        let expected = self.after(change);
        let blocks: Vec<Block> = expected.blocks.iter().map(|(block, _)| block.clone()).collect();
        let started = engine.begin(blocks)?;
        let pages: Vec<_> =
            change.pages.iter().map(|(block, page, kind)| (started[*block].number, *page, *kind)).collect();
        send(engine, &pages);
        let state =
            CheckpointState { definition: b"{}".into(), metadata: b"7".into(), devices: expected.devices.clone() };
        let committed = engine.commit(&state, 0)?;
        assert_eq!(committed.number, self.newest() + 1);
        self.checkpoints.insert(committed.number, expected);
        let surplus = self.checkpoints.len().saturating_sub(self.keep as usize);
        let old: Vec<u64> = self.checkpoints.keys().copied().take(surplus).collect();
        for number in old.into_iter().filter(|number| self.held != Some(*number)) {
            self.checkpoints.remove(&number);
        }
        Ok(committed)
    }

    /// Compares all kept checkpoints with the model.
    pub fn check(&self, disk: &impl TestDisk) {
        if self.checkpoints.is_empty() {
            assert!(matches!(image(disk, None), Err(StoreError::Empty { .. })));
            return;
        }
        assert_eq!(image(disk, None).unwrap().info().number, self.newest());
        for (number, expected) in &self.checkpoints {
            check_image(&image(disk, Some(*number)).unwrap(), *number, expected);
            check_image(&lazy(disk, Some(*number)).unwrap(), *number, expected);
        }
        let e = image(disk, Some(self.newest() + 1)).unwrap_err();
        let have: Vec<u64> = self.checkpoints.keys().copied().collect();
        assert!(matches!(&e, StoreError::NoSuchCheckpoint { have: found, .. } if *found == have), "{e}");
    }
}

/// Compares an image with the expected checkpoint.
pub fn check_image(image: &LocalImage, number: u64, expected: &Expected) {
    let info = image.info();
    assert_eq!(info.number, number);
    let blocks: Vec<_> = expected.blocks.iter().map(|(block, _)| block.clone()).collect();
    assert_eq!(info.blocks, blocks, "checkpoint {number}");
    assert_eq!(image.section(crate::format::entry::Section::Devices).unwrap(), expected.devices);
    let mut hot: Vec<_> = image.hot().unwrap().collect();
    hot.sort_unstable();
    let mut filled = Vec::new();
    let mut all = Vec::new();
    for (position, (block, pages)) in expected.blocks.iter().enumerate() {
        for page in 0..block.pages() {
            let id = (BlockId(position), PageNo(page));
            all.push(id);
            let kind = pages.get(&page).copied().unwrap_or(0);
            if kind != 0 {
                filled.push(id);
            }
            let mut found = [1; PAGE_SIZE];
            image.read_page(id, &mut found).unwrap();
            assert!(found == content(kind), "checkpoint {number}, block {}, page {page}", block.id);
        }
    }
    assert_eq!(hot, filled, "checkpoint {number}");
    let mut seen = Vec::new();
    image
        .read_many(&all, |(block, page), found| {
            let kind = expected.blocks[block.0].1.get(&page.0).copied().unwrap_or(0);
            assert!(*found == content(kind), "checkpoint {number}, block {block}, page {page}, of many");
            seen.push((block, page));
        })
        .unwrap();
    assert_eq!(seen, all);
}
