//! What is read of the store before the guest runs, and no more: nothing of it grows with the guest's RAM but, in a store
//! without a base index, the index itself. It is read while QEMU starts.

use super::{Request, RestoreError};
use crate::recipe::Recipe;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::stream::{self, RamSection};
use rekindle_store::types::{PAGE_SIZE, Page};
use rekindle_store::{Image, Which, admin};
use std::collections::BTreeSet;

const ZERO: Page = [0; PAGE_SIZE];

/// The checkpoint that is wanted, and how to build its VM. Its pages have not been looked for.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) image: Image,
    pub(super) recipe: Recipe,
}

impl Chosen {
    pub(super) fn open(request: &Request) -> Result<Self, RestoreError> {
        let which = Which { at: request.at, identity: request.identity.clone(), unlooked: true, ..Which::default() };
        let image = Image::open(&request.store, &which)?;
        let recipe = Recipe::read(&image.definition()?)?;
        Ok(Self { image, recipe })
    }
}

/// What a QEMU is given before its guest runs.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) image: Image,
    /// The names of the blocks that are brought on demand.
    pub(super) paged: Vec<String>,
    /// All pages of the others that are not zero: block, page, content.
    pages: Vec<(usize, u64, Box<Page>)>,
    devices: Vec<u8>,
}

/// Become the store's owner: a host that was declared dead and is not can commit nothing any more. What it has committed
/// until then counts: if that is a newer checkpoint, it is taken. Then read what is needed at once.
pub(super) fn fetch(chosen: Chosen, request: &Request, name: &str) -> Result<Ahead, RestoreError> {
    let Chosen { mut image, recipe } = chosen;
    let fenced = admin::fence(&request.store, image.vm(), &format!("restore {name}"), request.identity.as_ref())?;
    if request.at.is_none() && fenced.newest != image.info().number {
        let newer = Chosen::open(request)?;
        if newer.recipe != recipe {
            return Err(RestoreError::Changed { name: name.into(), number: newer.image.info().number });
        }
        image = newer.image;
    }
    let devices = image.devices()?;
    stream::check(&devices)?;
    let blocks = &image.info().blocks;
    let paged = recipe.hardware.ram_ids();
    let mut pages = Vec::new();
    for (index, block) in blocks.iter().enumerate().filter(|(_, block)| !paged.contains(&block.id)) {
        let all: Vec<_> = (0..block.pages()).map(|page| (index, page)).collect();
        image.read_many(&all, |(index, page), content| {
            if *content != ZERO {
                pages.push((index, page, Box::new(*content)));
            }
        })?;
    }
    Ok(Ahead { image, paged, pages, devices })
}

impl Ahead {
    /// The stream for a QEMU whose RAM is `ram`: all blocks but those that are brought on demand, and the devices.
    ///
    /// QEMU's own copy of a block starts as zeroes, or as what a firmware file holds. So zeroes are sent too, but only where
    /// there is something to be overwritten: a video memory of 16 MiB has hardly anything in it.
    pub(super) fn stream(&self, ram: &GuestRam) -> Result<Vec<u8>, RestoreError> {
        let blocks = &self.image.info().blocks;
        let small = || blocks.iter().enumerate().filter(|(_, block)| !self.paged.contains(&block.id));
        let mut part = stream::HEADER.to_vec();
        let sizes: Vec<_> = small().map(|(_, block)| (block.id.as_str(), block.used)).collect();
        let mut section = RamSection::start(&mut part, sizes.into_iter());
        for (index, block) in small() {
            let mine = self.pages.iter().filter(|(of, _, _)| *of == index);
            let sent: BTreeSet<u64> = mine.clone().map(|(_, page, _)| *page).collect();
            let ours = ram.blocks().iter().find(|ours| ours.told.id == block.id);
            let there = ours.map(|ours| ram.populated(ours)).transpose()?.unwrap_or_default();
            let page_size = PAGE_SIZE as u64;
            let there = there.into_iter().flat_map(|run| run.start / page_size..run.end.div_ceil(page_size));
            for page in there.filter(|page| *page < block.pages() && !sent.contains(page)) {
                section.page(&mut part, &block.id, page * page_size, &ZERO);
            }
            for (_, page, content) in mine {
                section.page(&mut part, &block.id, page * page_size, content);
            }
        }
        section.end(&mut part);
        part.extend_from_slice(stream::check(&self.devices)?);
        Ok(part)
    }
}
