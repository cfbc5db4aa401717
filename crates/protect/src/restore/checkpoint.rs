//! What is read of the store before the guest runs, and no more: nothing of it grows with the guest's RAM but, in a store
//! without a base index, the index itself. It is read while QEMU starts.

use super::{Request, RestoreError, TakeOver};
use crate::epochs;
use crate::first;
use crate::owned::Owned;
use crate::recipe::{Recipe, RecipeError};
use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_memory::missing::{Pager, PagerError};
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::stream::{self, RamSection};
use rekindle_store::image::PageId;
use rekindle_store::types::{Block, Guest, OnlyIf, Owner, PAGE_SIZE, Page, Vm};
use rekindle_store::{Image, ReadOptions};
use rekindle_vm::disks::Epochs;
use rekindle_vm::rundir::RunDir;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::thread;

const ZERO: Page = [0; PAGE_SIZE];

/// The checkpoint that is wanted, and how to build its VM. Its pages have not been looked for.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) image: Image,
    pub(crate) recipe: Recipe,
    /// What its disks were.
    pub(crate) epochs: Epochs,
}

impl Chosen {
    pub(crate) fn open(request: &Request) -> Result<Self, RestoreError> {
        let spare = request.take_over.as_ref().map(|take_over| take_over.spare.clone()).unwrap_or_default();
        let identity = request.identity.clone();
        let which = ReadOptions { at: request.at, identity, lazy: true, spare, ..ReadOptions::default() };
        let image = Image::open(&request.store, &which)?;
        let recipe = Recipe::read(&image.definition()?)?;
        let epochs = epochs::read(&image.metadata()?).map_err(RecipeError::Odd)?;
        Ok(Self { image, recipe, epochs })
    }
}

/// A checkpoint, which may still have to be committed.
#[derive(Debug, Default)]
pub(super) struct Late(OnceLock<Option<Image>>);

impl Late {
    fn is(image: Image) -> Self {
        Self(OnceLock::from(Some(image)))
    }

    /// It is there; or it will never be.
    pub(super) fn set(&self, image: Option<Image>) {
        let _ = self.0.set(image);
    }

    /// Wait for it.
    pub(super) fn wait(&self) -> Option<&Image> {
        self.0.wait().as_ref()
    }
}

/// What a QEMU is given before its guest runs.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub(super) image: Late,
    /// The number of that checkpoint.
    pub(super) number: u64,
    /// Its RAM block table.
    pub(super) blocks: Vec<Block>,
    /// The names of the blocks that are brought on demand.
    pub(super) paged: Vec<String>,
    pub(super) devices: Vec<u8>,
    /// None: to be read while something else is waited for.
    pub(super) pages: Option<Pages>,
}

/// Pages that are read at once.
#[derive(Debug)]
pub(super) struct Pages {
    /// Pages of the blocks that are not brought on demand.
    pub(super) small: Small,
    /// Pages of the others which QEMU itself looks at when it loads the devices.
    pub(super) first: first::Pages,
}

#[derive(Debug)]
pub(super) enum Small {
    /// All that are not zero.
    All(first::Pages),
    /// Those of which the QEMU's own copy is another one.
    Differing(first::Pages),
}

/// Become the store's owner: a host that was declared dead and is not can commit nothing any more, and ends its guest when it sees
/// that. Gives the newest checkpoint that was committed until then.
fn fence(request: &Request, vm: &Vm, rundir: &RunDir) -> Result<u64, RestoreError> {
    let Request { store, identity, take_over, .. } = request;
    let owner = |doing: &str| Owner::here(&format!("{doing} {}", rundir.name())).with(Guest::Restored);
    let Some(TakeOver { after, spare, .. }) = take_over.as_deref() else {
        return Ok(Owned::begin(rundir, store, identity.as_ref(), vm, &owner("restore"), None)?.newest);
    };
    let only_if = Some(OnlyIf::Epoch(after.load(Ordering::SeqCst)));
    let fenced = Owned::begin_over(spare, rundir, store, identity.as_ref(), vm, &owner("move"), only_if)?;
    after.store(fenced.epoch, Ordering::SeqCst);
    Ok(fenced.newest)
}

/// Become the store's owner beside a load of checkpoint `number`, which counts only if this says so.
pub(super) fn fence_beside(request: &Request, vm: &Vm, number: u64, rundir: &RunDir) -> Result<(), RestoreError> {
    let name = rundir.name();
    match fence(request, vm, rundir)? {
        newest if request.at.is_none() && newest != number => Err(RestoreError::Newer { name: name.into(), newest }),
        _ => Ok(()),
    }
}

/// Become the store's owner; what was committed until then counts: if that is a newer checkpoint, it is taken. Then read what
/// is needed at once.
pub(super) fn fetch(mut chosen: Chosen, request: &Request, rundir: &RunDir) -> Result<Ahead, RestoreError> {
    let name = rundir.name();
    let newest = fence(request, chosen.image.vm(), rundir)?;
    if request.at.is_none() && newest != chosen.image.info().number {
        let newer = Chosen::open(request)?;
        if newer.recipe != chosen.recipe || newer.epochs != chosen.epochs {
            return Err(RestoreError::Changed { name: name.into(), number: newer.image.info().number });
        }
        chosen = newer;
    }
    let ahead = read(chosen)?;
    let small = |image: &_| Ok(Small::All(read_small(image, &ahead.paged)?));
    let pages = ahead.read_pages(small)?;
    Ok(Ahead { pages: Some(pages), ..ahead })
}

/// Read the devices. What else is needed at once is read when it is asked for.
pub(crate) fn read(chosen: Chosen) -> Result<Ahead, RestoreError> {
    let Chosen { image, recipe, .. } = chosen;
    let devices = image.devices()?;
    stream::check(&devices)?;
    let (number, blocks, paged) = (image.info().number, image.info().blocks.clone(), recipe.hardware.ram_ids());
    Ok(Ahead { image: Late::is(image), number, blocks, paged, devices, pages: None })
}

/// The blocks that are not brought on demand.
fn small<'a>(blocks: &'a [Block], paged: &'a [String]) -> impl Iterator<Item = (usize, &'a Block)> {
    blocks.iter().enumerate().filter(|(_, block)| !paged.contains(&block.id))
}

/// All their pages that are not zero.
fn read_small(image: &Image, paged: &[String]) -> Result<first::Pages, RestoreError> {
    let all: Vec<_> = small(&image.info().blocks, paged)
        .flat_map(|(index, block)| (0..block.pages()).map(move |page| (index, page)))
        .collect();
    Ok(first::together(image, &all, |content| *content != ZERO)?)
}

/// Give a QEMU that waits what the checkpoint has in the blocks that are not brought on demand: a QEMU that expects a state does not
/// load firmware. Most of it is still right in the checkpoint that is restored; what is not is found out then.
pub(super) fn put_small(image: &Image, paged: &[String], ram: &GuestRam, process: Process) -> Result<(), RestoreError> {
    for (index, page, content) in read_small(image, paged)? {
        let block = image.info().blocks.get(index);
        let ours = ram.blocks().iter().find(|ours| block.is_some_and(|block| ours.info.id == block.id));
        let Some(ours) = ours else { continue };
        let address = ours.address + page * PAGE_SIZE as u64;
        if !ours.used().contains(&address) {
            continue;
        }
        if let Err(e) = memory::write(process, address, &*content) {
            tracing::debug!("page {page} of {} is left to the restore: {e}", ours.info.id);
        }
    }
    Ok(())
}

/// Pages with their content.
pub(super) type Contents = BTreeMap<PageId, Box<Page>>;

impl Ahead {
    /// The checkpoint, once it is committed.
    pub(super) fn image(&self) -> Result<&Image, RestoreError> {
        self.image.wait().ok_or(RestoreError::NotCommitted { number: self.number })
    }

    /// The blocks that are not brought on demand.
    pub(super) fn small(&self) -> impl Iterator<Item = (usize, &Block)> {
        small(&self.blocks, &self.paged)
    }

    /// Read what else is needed at once, for a QEMU that waits and whose RAM is `ram`.
    pub(super) fn with_pages(self, ram: &GuestRam) -> Result<Self, RestoreError> {
        let pages = self.read_pages(|image| self.read_differing(image, &self.there(ram)?))?;
        Ok(Self { pages: Some(pages), ..self })
    }

    /// Read the pages that QEMU looks at first, and beside that what `small` reads.
    pub(super) fn read_pages(
        &self,
        small: impl FnOnce(&Image) -> Result<Small, RestoreError>,
    ) -> Result<Pages, RestoreError> {
        let image = self.image()?;
        let (small, first) = thread::scope(|scope| {
            let first = scope.spawn(|| self.read_first());
            (small(image), first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        Ok(Pages { small: small?, first })
    }

    /// Of the blocks that are not brought on demand, the pages that are another content than `there`, which is QEMU's own copy.
    pub(super) fn read_differing(&self, image: &Image, there: &Contents) -> Result<Small, RestoreError> {
        Ok(Small::Differing(first::together(image, &image.unlike(&self.all_small(there))?, |_| true)?))
    }

    /// All pages of the blocks that are not brought on demand, as `there` says; what it does not name is zero.
    pub(super) fn all_small<'a>(&self, there: &'a Contents) -> Vec<(PageId, &'a Page)> {
        let content = |id: &PageId| there.get(id).map_or(&ZERO, |content| &**content);
        let ids = self.small().flat_map(|(index, block)| (0..block.pages()).map(move |page| (index, page)));
        ids.map(|id| (id, content(&id))).collect()
    }

    /// What QEMU has of those blocks itself. Their other pages are zero.
    pub(super) fn there(&self, ram: &GuestRam) -> Result<Contents, RestoreError> {
        let mut all = Contents::new();
        for (index, block) in self.small() {
            all.extend(there(ram, block)?.into_iter().map(|(page, content)| ((index, page), content)));
        }
        Ok(all)
    }

    fn read_first(&self) -> first::Pages {
        let image = self.image.wait();
        image.map_or_else(first::Pages::new, |image| first::read(image, &self.paged, &self.devices))
    }

    /// The pages that QEMU looks at first.
    pub(super) fn first(&self) -> Cow<'_, first::Pages> {
        self.pages.as_ref().map_or_else(|| Cow::Owned(self.read_first()), |pages| Cow::Borrowed(&pages.first))
    }

    /// Put them.
    pub(super) fn put_first(&self, first: &first::Pages, pager: &mut Pager) -> Result<(), PagerError> {
        first.iter().try_for_each(|(block, page, content)| {
            let id = self.blocks.get(*block).map_or("", |block| &block.id);
            pager.prefill_page(id, *page, content)
        })
    }

    /// The stream for a QEMU whose RAM is `ram`: all blocks but those that are brought on demand, and the devices.
    pub(super) fn stream(&self, ram: &GuestRam) -> Result<Vec<u8>, RestoreError> {
        let pages = match &self.pages {
            Some(Pages { small: Small::All(all), .. }) => Cow::Owned(self.with_zeroes(all, ram)?),
            Some(Pages { small: Small::Differing(differing), .. }) => Cow::Borrowed(differing),
            None => match self.read_differing(self.image()?, &self.there(ram)?)? {
                Small::All(pages) | Small::Differing(pages) => Cow::Owned(pages),
            },
        };
        let mut part = stream::HEADER.to_vec();
        let sizes: Vec<_> = self.small().map(|(_, block)| (block.id.as_str(), block.used)).collect();
        let mut section = RamSection::start(&mut part, sizes.into_iter());
        for (index, block) in self.small() {
            for (_, page, content) in pages.iter().filter(|(of, _, _)| *of == index) {
                section.page(&mut part, &block.id, page * PAGE_SIZE as u64, content);
            }
        }
        section.end(&mut part);
        part.extend_from_slice(stream::check(&self.devices)?);
        Ok(part)
    }

    /// `pages` are all that are not zero. QEMU's own copy of a block starts as zeroes, or as what a firmware file holds: so zeroes
    /// are sent too, but only where there is something to be overwritten: a video memory of 16 MiB has hardly anything in it.
    fn with_zeroes(&self, pages: &first::Pages, ram: &GuestRam) -> Result<first::Pages, RestoreError> {
        let sent: BTreeSet<_> = pages.iter().map(|(block, page, _)| (*block, *page)).collect();
        let mut all = pages.clone();
        for (index, block) in self.small() {
            let there = there(ram, block)?.into_keys().filter(|page| *page < block.pages());
            let zero = there.filter(|page| !sent.contains(&(index, *page)));
            all.extend(zero.map(|page| (index, page, Box::new(ZERO))));
        }
        Ok(all)
    }
}

/// The pages that QEMU has of a block. The others are zero.
fn there(ram: &GuestRam, block: &Block) -> Result<BTreeMap<u64, Box<Page>>, RestoreError> {
    let Some(ours) = ram.blocks().iter().find(|ours| ours.info.id == block.id) else { return Ok(BTreeMap::new()) };
    let runs = ram.populated(ours)?;
    let mut content = vec![0; runs.iter().map(|run| (run.end - run.start) as usize).sum()];
    ram.read(ours, &runs, &mut content)?;
    let pages = runs.into_iter().flat_map(|run| run.step_by(PAGE_SIZE)).map(|at| at / PAGE_SIZE as u64);
    Ok(pages.zip(content.as_chunks::<PAGE_SIZE>().0).map(|(page, content)| (page, Box::new(*content))).collect())
}
