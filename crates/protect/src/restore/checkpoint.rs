//! Reads the part of a checkpoint that a restore needs before the guest runs: the device state, the blocks that are not
//! loaded on demand (*small blocks*), and the pages that QEMU itself reads during the load. Its size does not grow with
//! the guest's RAM, except for the index in a store without a base index. It is read while QEMU starts.

use super::{MoveClaim, Request, RestoreError};
use crate::epochs;
use crate::load_pages;
use crate::owned::OwnerRecord;
use crate::recipe::permission::{AllowedDomain, AllowedRecipe, Permission};
use crate::recipe::{Recipe, RecipeError};
use crate::save_image::SaveImageError;
use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_memory::missing::{Pager, PagerError};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageId, PageNo, ZERO_PAGE};
use rekindle_qemu::stream::{self, RamSection};
use rekindle_store::admin::Fenced;
use rekindle_store::types::{Block, Guest, KnownStore, OnlyIf, Owner, Vm};
use rekindle_store::{Image, ReadOptions};
use rekindle_vm::disks::Epochs;
use rekindle_vm::overlays::OverlayEpoch;
use rekindle_vm::rundir::RunDir;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread;

/// A checkpoint to restore, with its recipe. Its pages are not checked yet. `R`: [`AllowedRecipe`], [`AllowedDomain`], or
/// [`Recipe`] as long as nothing has checked whether this host may run it.
#[derive(Debug)]
pub(crate) struct ChosenCheckpoint<R = AllowedRecipe> {
    pub(crate) image: Image,
    pub(crate) recipe: R,
    /// What the checkpoint may use of this host.
    permission: Arc<Permission>,
    /// The epochs of the guest's disks.
    pub(crate) epochs: Epochs,
    /// The disks that are on overlays.
    pub(crate) overlays: Vec<OverlayEpoch>,
}

impl ChosenCheckpoint {
    /// Opens the checkpoint and checks that this host may run its guest.
    pub(crate) fn open(permission: &Arc<Permission>, request: &Request) -> Result<Self, RestoreError> {
        let ChosenCheckpoint { image, recipe, permission, epochs, overlays } =
            ChosenCheckpoint::open_unchecked(permission, request)?;
        let recipe = permission.allow(recipe, &overlays)?;
        Ok(Self { image, recipe, permission, epochs, overlays })
    }
}

impl ChosenCheckpoint<Recipe> {
    /// Checks that libvirt of this host may run the domain. `defined_xml`: see [`Permission::allow_domain`].
    pub(crate) fn allow_domain(
        self,
        defined_xml: &dyn Fn(&str) -> Option<String>,
    ) -> Result<ChosenCheckpoint<AllowedDomain>, RestoreError> {
        let Self { image, recipe, permission, epochs, overlays } = self;
        let number = image.info().number;
        let recipe = permission.allow_domain(recipe, &overlays, defined_xml)?;
        let recipe = recipe.ok_or(SaveImageError::NoDomain { number })?;
        Ok(ChosenCheckpoint { image, recipe, permission, epochs, overlays })
    }

    pub(crate) fn open_unchecked(permission: &Arc<Permission>, request: &Request) -> Result<Self, RestoreError> {
        let credentials = request.credentials.clone();
        let (at, expected) = (request.at, Some(request.expected()?));
        let which = ReadOptions { at, credentials, expected, lazy: true, ..ReadOptions::default() };
        let image = Image::open(&request.store, &which)?;
        let recipe = Recipe::read(&image.definition()?)?;
        let metadata = image.metadata()?;
        let epochs = epochs::read(&metadata).map_err(RecipeError::Malformed)?;
        let overlays = epochs::read_overlays(&metadata).map_err(RecipeError::Malformed)?;
        Ok(Self { image, recipe, permission: Arc::clone(permission), epochs, overlays })
    }
}

impl<R> ChosenCheckpoint<R> {
    /// Checks that the storage has shown the same checkpoint to the claim, which has found `known`.
    pub(super) fn require_footer_of(
        &self,
        known: KnownStore,
        request: &Request,
        name: &str,
    ) -> Result<(), RestoreError> {
        let number = self.image.info().number;
        if known.footer == self.image.footer() {
            return Ok(());
        }
        let (name, store) = (name.into(), request.store.to_string());
        Err(RestoreError::WentBack { name, store, newest: number, number })
    }
}

/// A checkpoint that may not be committed yet.
#[derive(Debug, Default)]
pub(super) struct PendingImage(OnceLock<Option<Image>>);

impl PendingImage {
    fn committed(image: Image) -> Self {
        Self(OnceLock::from(Some(image)))
    }

    /// Sets the committed image, or `None` if the checkpoint will never be committed.
    pub(super) fn set(&self, image: Option<Image>) {
        let _ = self.0.set(image);
    }

    /// Waits until the checkpoint is committed. Returns `None` if it will never be.
    pub(super) fn wait(&self) -> Option<&Image> {
        self.0.wait().as_ref()
    }
}

/// The part of a checkpoint that a destination QEMU gets before its guest runs.
#[derive(Debug)]
pub(crate) struct LoadInput {
    pub(super) image: PendingImage,
    pub(crate) number: u64,
    pub(super) blocks: Vec<Block>,
    /// Ids of the blocks that are loaded on demand.
    pub(super) paged: Vec<String>,
    pub(super) devices: Vec<u8>,
    /// `None`: the pages are read later, during another wait.
    pub(super) pages: Option<ReadPages>,
}

/// Pages that a load needs.
#[derive(Debug)]
pub(super) struct ReadPages {
    /// Pages of the blocks that are not loaded on demand.
    pub(super) small: SmallBlockPages,
    /// Pages of the other blocks that QEMU itself reads while it loads the devices.
    pub(super) for_load: load_pages::Pages,
}

#[derive(Debug)]
pub(super) enum SmallBlockPages {
    /// All pages that are not zero.
    All(load_pages::Pages),
    /// The pages that differ from QEMU's own copy.
    Differing(load_pages::Pages),
}

/// Makes this host the store's owner. A host that was declared dead and is alive can then commit nothing any more, and
/// ends its guest when it detects that.
pub(super) fn claim_store(request: &Request, vm: &Vm, rundir: &RunDir) -> Result<Fenced, RestoreError> {
    let Request { store, credentials, known_store, move_claim, .. } = request;
    let owner = |operation: &str| Owner::here(&format!("{operation} {}", rundir.name())).with(Guest::Restored);
    let credentials = credentials.as_ref();
    let fenced = match move_claim.as_deref() {
        None => {
            let only_if = Some(OnlyIf::Expected(request.expected()?));
            OwnerRecord::claim(rundir, store, credentials, vm, &owner("restore"), only_if)?
        }
        Some(MoveClaim { owner_epoch, checkpoint, .. }) => {
            let only_if = Some(OnlyIf::Epoch(owner_epoch.load(Ordering::SeqCst)));
            let fenced = OwnerRecord::claim(rundir, store, credentials, vm, &owner("move"), only_if)?;
            owner_epoch.store(fenced.epoch, Ordering::SeqCst);
            let (newest, number) = (checkpoint.load(Ordering::SeqCst), fenced.newest);
            if number < newest {
                let (name, store) = (rundir.name().into(), store.to_string());
                return Err(RestoreError::WentBack { name, store, newest, number });
            }
            fenced
        }
    };
    known_store.note(store, fenced.known);
    Ok(fenced)
}

/// Makes this host the store's owner during a load of checkpoint `number`. The load is valid only if this succeeds.
pub(super) fn claim_during_load(request: &Request, vm: &Vm, number: u64, rundir: &RunDir) -> Result<(), RestoreError> {
    let name = rundir.name();
    match claim_store(request, vm, rundir)?.newest {
        newest if request.at.is_none() && newest != number => Err(RestoreError::Newer { name: name.into(), newest }),
        _ => Ok(()),
    }
}

/// Makes this host the store's owner. If another checkpoint was committed before that, uses the newest one. Then reads
/// the data that the load needs.
pub(super) fn claim_and_read(
    mut chosen: ChosenCheckpoint,
    request: &Request,
    rundir: &RunDir,
) -> Result<LoadInput, RestoreError> {
    let name = rundir.name();
    let Fenced { newest, known, .. } = claim_store(request, chosen.image.vm(), rundir)?;
    if request.at.is_none() && newest != chosen.image.info().number {
        let newer = ChosenCheckpoint::open(&chosen.permission, request)?;
        let number = newer.image.info().number;
        if number < newest {
            return Err(RestoreError::WentBack { name: name.into(), store: request.store.to_string(), newest, number });
        }
        if !newer.recipe.has_same_machine(&chosen.recipe)
            || newer.epochs != chosen.epochs
            || newer.overlays != chosen.overlays
        {
            return Err(RestoreError::Changed { name: name.into(), number: newer.image.info().number });
        }
        chosen = newer;
    }
    if request.at.is_none() {
        chosen.require_footer_of(known, request, name)?;
    }
    let ChosenCheckpoint { image, recipe, .. } = chosen;
    let input = read(image, recipe.ram_ids())?;
    let pages = input.read_pages(|image| Ok(SmallBlockPages::All(read_small_blocks(image, &input.paged)?)))?;
    Ok(LoadInput { pages: Some(pages), ..input })
}

/// Reads the device state. The pages are read when they are needed. `paged`: ids of the blocks that are loaded on demand.
pub(crate) fn read(image: Image, paged: Vec<String>) -> Result<LoadInput, RestoreError> {
    let devices = image.devices()?;
    stream::check(&devices)?;
    let (number, blocks) = (image.info().number, image.info().blocks.clone());
    Ok(LoadInput { image: PendingImage::committed(image), number, blocks, paged, devices, pages: None })
}

/// Returns the blocks that are not loaded on demand.
fn small_blocks<'a>(blocks: &'a [Block], paged: &'a [String]) -> impl Iterator<Item = (BlockId, &'a Block)> {
    (0..).map(BlockId).zip(blocks).filter(|(_, block)| !paged.contains(&block.id))
}

/// Reads all pages that are not zero of the blocks that are not loaded on demand.
fn read_small_blocks(image: &Image, paged: &[String]) -> Result<load_pages::Pages, RestoreError> {
    let page_ids: Vec<_> = small_blocks(&image.info().blocks, paged)
        .flat_map(|(index, block)| (0..block.pages()).map(move |page| (index, PageNo(page))))
        .collect();
    Ok(load_pages::read_parallel(image, &page_ids, |content| *content != ZERO_PAGE)?)
}

/// Writes the blocks that are not loaded on demand into a waiting QEMU, which does not load firmware itself. Most of
/// these pages are unchanged at the restore, which compares them.
pub(super) fn write_small_blocks(
    image: &Image,
    paged: &[String],
    ram: &GuestRam,
    process: Process,
) -> Result<(), RestoreError> {
    for ((index, page), content) in read_small_blocks(image, paged)? {
        let Some(stored_block) = image.info().blocks.get(index.0) else { continue };
        let Some(block) = find_block(ram, &stored_block.id) else { continue };
        let address = block.address + page.offset();
        if !block.used().contains(&address) {
            continue;
        }
        if let Err(e) = memory::write(process, address, &*content) {
            tracing::debug!("page {page} of {} is left to the restore: {e}", block.info.id);
        }
    }
    Ok(())
}

/// Pages with their content.
pub(super) type Contents = BTreeMap<PageId, Box<Page>>;

impl LoadInput {
    /// Waits until the checkpoint is committed, and returns it.
    pub(super) fn image(&self) -> Result<&Image, RestoreError> {
        self.image.wait().ok_or(RestoreError::NotCommitted { number: self.number })
    }

    /// Returns the blocks that are not loaded on demand.
    pub(super) fn small_blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        small_blocks(&self.blocks, &self.paged)
    }

    /// Reads the pages for a waiting QEMU whose RAM is `ram`.
    pub(super) fn with_pages(self, ram: &GuestRam) -> Result<Self, RestoreError> {
        let pages = self.read_pages(|image| self.read_differing(image, &self.own_copy(ram)?))?;
        Ok(Self { pages: Some(pages), ..self })
    }

    /// Reads the pages that QEMU needs during the load; those of the small blocks with `read_small`.
    pub(super) fn read_pages(
        &self,
        read_small: impl FnOnce(&Image) -> Result<SmallBlockPages, RestoreError>,
    ) -> Result<ReadPages, RestoreError> {
        let image = self.image()?;
        thread::scope(|scope| {
            let for_load = scope.spawn(|| self.read_pages_for_load());
            let small = read_small(image);
            let for_load = for_load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok(ReadPages { small: small?, for_load })
        })
    }

    /// Reads the pages that differ from `own_copy`, QEMU's own copy, in the blocks that are not loaded on demand.
    pub(super) fn read_differing(&self, image: &Image, own_copy: &Contents) -> Result<SmallBlockPages, RestoreError> {
        let differing = image.unlike(&self.small_block_pages(own_copy))?;
        Ok(SmallBlockPages::Differing(load_pages::read_parallel(image, &differing, |_| true)?))
    }

    /// Returns all pages of the blocks that are not loaded on demand, with their content in `own_copy`. Pages that are
    /// missing in it are zero.
    pub(super) fn small_block_pages<'a>(&self, own_copy: &'a Contents) -> Vec<(PageId, &'a Page)> {
        let content = |id: &PageId| own_copy.get(id).map_or(&ZERO_PAGE, |content| &**content);
        let ids =
            self.small_blocks().flat_map(|(index, block)| (0..block.pages()).map(move |page| (index, PageNo(page))));
        ids.map(|id| (id, content(&id))).collect()
    }

    /// Reads QEMU's own copy of the blocks that are not loaded on demand. Pages that are missing in the result are
    /// zero.
    pub(super) fn own_copy(&self, ram: &GuestRam) -> Result<Contents, RestoreError> {
        let mut contents = Contents::new();
        for (index, block) in self.small_blocks() {
            contents.extend(own_copy(ram, block)?.into_iter().map(|(page, content)| ((index, page), content)));
        }
        Ok(contents)
    }

    fn read_pages_for_load(&self) -> load_pages::Pages {
        let image = self.image.wait();
        image.map_or_else(load_pages::Pages::new, |image| load_pages::read(image, &self.paged, &self.devices))
    }

    /// Returns the pages that QEMU reads during the load.
    pub(super) fn pages_for_load(&self) -> Cow<'_, load_pages::Pages> {
        self.pages
            .as_ref()
            .map_or_else(|| Cow::Owned(self.read_pages_for_load()), |pages| Cow::Borrowed(&pages.for_load))
    }

    /// Puts `pages` into the guest's memory.
    pub(super) fn put_pages_for_load(
        &self,
        pages: &load_pages::Pages,
        ram: &GuestRam,
        pager: &mut Pager,
    ) -> Result<(), PagerError> {
        // The blocks of this QEMU may have other positions than in the checkpoint.
        let block_ids: Vec<_> = self.blocks.iter().map(|block| ram.block_id(&block.id)).collect();
        for ((block, page), content) in pages {
            if let Some(Some(id)) = block_ids.get(block.0) {
                pager.prefill_page(*id, *page, content)?;
            }
        }
        Ok(())
    }

    /// Builds the stream for a QEMU whose RAM is `ram`: the blocks that are not loaded on demand, and the devices.
    pub(super) fn stream(&self, ram: &GuestRam) -> Result<Vec<u8>, RestoreError> {
        let pages = match &self.pages {
            Some(ReadPages { small: SmallBlockPages::All(pages), .. }) => Cow::Owned(self.with_zeroes(pages, ram)?),
            Some(ReadPages { small: SmallBlockPages::Differing(pages), .. }) => Cow::Borrowed(pages),
            None => match self.read_differing(self.image()?, &self.own_copy(ram)?)? {
                SmallBlockPages::All(pages) | SmallBlockPages::Differing(pages) => Cow::Owned(pages),
            },
        };
        let mut bytes = stream::HEADER.to_vec();
        let sizes: Vec<_> = self.small_blocks().map(|(_, block)| (block.id.as_str(), block.used)).collect();
        let mut section = RamSection::start(&mut bytes, sizes.into_iter());
        for (index, block) in self.small_blocks() {
            for ((_, page), content) in pages.iter().filter(|((of, _), _)| *of == index) {
                section.page(&mut bytes, &block.id, page.offset(), content);
            }
        }
        section.end(&mut bytes);
        bytes.extend_from_slice(stream::check(&self.devices)?);
        Ok(bytes)
    }

    /// Builds the stream for a QEMU without capabilities whose own copy of the small blocks is unknown: all pages of these
    /// blocks, no page of the others, and the devices. `machine`: its versioned type. Starts after [`stream::HEADER`].
    pub(super) fn plain_stream(&self, machine: &str) -> Result<Vec<u8>, RestoreError> {
        let small = read_small_blocks(self.image()?, &self.paged)?.into_iter().collect::<Contents>();
        let mut bytes = Vec::new();
        stream::configuration(&mut bytes, machine);
        let blocks = self.blocks.iter().filter(|block| block.used > 0);
        let mut section = RamSection::start_plain(&mut bytes, blocks.map(|block| (block.id.as_str(), block.used)));
        for ((index, page), content) in self.small_block_pages(&small) {
            if let Some(block) = self.blocks.get(index.0) {
                section.page(&mut bytes, &block.id, page.offset(), content);
            }
        }
        section.end(&mut bytes);
        bytes.extend_from_slice(stream::check(&self.devices)?);
        Ok(bytes)
    }

    /// Adds the necessary zero pages to `pages`, which has all pages that are not zero. QEMU's own copy of a block
    /// starts as zeros or as a firmware file, so only the pages that QEMU has populated are overwritten: a video memory
    /// of 16 MiB has hardly any.
    fn with_zeroes(&self, pages: &load_pages::Pages, ram: &GuestRam) -> Result<load_pages::Pages, RestoreError> {
        let with_content: BTreeSet<_> = pages.iter().map(|(id, _)| *id).collect();
        let mut complete = pages.clone();
        for (index, block) in self.small_blocks() {
            let populated = own_copy(ram, block)?.into_keys().filter(|page| page.0 < block.pages());
            let zero = populated.filter(|page| !with_content.contains(&(index, *page)));
            complete.extend(zero.map(|page| ((index, page), Box::new(ZERO_PAGE))));
        }
        Ok(complete)
    }
}

/// Finds the block `id` of a QEMU.
fn find_block<'a>(ram: &'a GuestRam, id: &str) -> Option<&'a rekindle_memory::ram::Block> {
    ram.blocks().iter().find(|block| block.info.id == id)
}

/// Reads the populated pages of a block in QEMU. The other pages are zero.
fn own_copy(ram: &GuestRam, block: &Block) -> Result<BTreeMap<PageNo, Box<Page>>, RestoreError> {
    let Some(own_block) = find_block(ram, &block.id) else { return Ok(BTreeMap::new()) };
    let runs = ram.populated(own_block)?;
    let mut content = vec![0; runs.iter().map(|run| (run.end - run.start) as usize).sum()];
    ram.read(own_block, &runs, &mut content)?;
    Ok(runs
        .numbers()
        .zip(content.as_chunks::<PAGE_SIZE>().0)
        .map(|(page, content)| (page, Box::new(*content)))
        .collect())
}
