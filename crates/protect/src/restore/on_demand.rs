//! RAM whose pages are read from a checkpoint when the guest needs them.
//!
//! Until the guest runs, a thread of this process supplies the pages that the guest or its devices wait for. After
//! that, a pager process replaces the thread. Except in an eager restore, the process is started only then, because the
//! guest would have to wait for its start.

use super::checkpoint::LoadInput;
use super::{RestoreError, require_same_blocks};
use crate::fill::{Fill, lock_pager};
use crate::pager::CheckpointPages;
use rekindle_handover::ram::{Ram, RamSource};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::spawn::{detach, disown, this_program};
use rekindle_memory::missing::{Content, Need, PageSource, Pager, PagerError, Progress};
use rekindle_memory::ram::{Block, GuestRam};
use rekindle_pages::{BlockId, Page, PageId, PageNo};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::Feed;
use rekindle_qemu::userfaultfd;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::Credentials;
use rekindle_store::StoreUrl;
use rekindle_vm::journal::Operation;
use rekindle_vm::rundir::RunDir;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long an eager restore may take.
const FILL_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
const FILL_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a pager process may take to open the store. The thread of this process supplies the guest's pages
/// meanwhile.
const PAGER_START_TIMEOUT: Duration = Duration::from_secs(60);

/// The registered memory of a QEMU that reads its device state from a pipe. All pages are missing, and access to a
/// missing page blocks.
#[derive(Debug)]
pub(crate) struct RegisteredMemory {
    injector: Injector,
    pager: Pager,
    feed: Feed,
}

impl RegisteredMemory {
    /// Registers the blocks `paged`.
    pub(crate) fn new(vmm: &Vmm, qmp: &mut Qmp, ram: &GuestRam, paged: &[String]) -> Result<Self, RestoreError> {
        let injector = Injector::new(vmm.process())?;
        // A QEMU that runs as another user may not be permitted to create a userfaultfd itself.
        let device = userfaultfd::hand(qmp, vmm.process())?;
        let pager = Pager::register(injector, ram, |id| paged.iter().any(|paged| paged == id), device);
        userfaultfd::take_back(qmp)?;
        Ok(Self { injector, pager: pager?, feed: Feed::open(qmp, &[])? })
    }
}

/// The RAM of a destination whose missing pages are in a checkpoint.
#[derive(Debug)]
pub struct OnDemandRam {
    input: Arc<LoadInput>,
    ram: Arc<GuestRam>,
    /// Memory that an earlier command has registered.
    registered: Option<RegisteredMemory>,
    /// Set by [`RamSource::connect`].
    connected: Option<ConnectedRam>,
}

/// A destination whose memory is registered.
#[derive(Debug)]
struct ConnectedRam {
    injector: Injector,
    /// The device state and the pages of the blocks that are not loaded on demand.
    stream: Vec<u8>,
    supply: PageSupply,
}

impl OnDemandRam {
    pub(crate) fn new(
        input: Arc<LoadInput>,
        ram: GuestRam,
        registered: Option<RegisteredMemory>,
    ) -> Result<Self, RestoreError> {
        require_same_blocks(&ram, &input.blocks, input.number, &input.paged)?;
        Ok(Self { input, ram: Arc::new(ram), registered, connected: None })
    }

    /// Adopts memory that `pager` has registered, and puts the pages into it that QEMU reads while it loads the devices.
    /// From then on, access to a missing page blocks until the page is supplied. `ram` has at least the blocks that are
    /// loaded on demand.
    pub(crate) fn adopt(
        input: Arc<LoadInput>,
        ram: GuestRam,
        injector: Injector,
        mut pager: Pager,
    ) -> Result<Self, RestoreError> {
        pager.overwrite_present_pages(&ram, &mut UncommittedPages::new(&input, &ram))?;
        input.put_pages_for_load(&input.pages_for_load(), &ram, &mut pager)?;
        let ram = Arc::new(ram);
        let supply = PageSupply::start(pager, Arc::clone(&input), Arc::clone(&ram));
        let connected = Some(ConnectedRam { injector, stream: Vec::new(), supply });
        Ok(Self { input, ram, registered: None, connected })
    }

    /// Replaces the table of blocks by the one that QEMU reports. Rejects one in which a block that is loaded on demand
    /// is not where its memory was registered.
    pub(crate) fn verify(&mut self, reported: GuestRam) -> Result<(), RestoreError> {
        require_same_blocks(&reported, &self.input.blocks, self.input.number, &self.input.paged)?;
        let place = |ram: &GuestRam, id: &String| ram.block_id(id).and_then(|id| ram.block(id)).map(Block::used);
        for id in &self.input.paged {
            if place(&reported, id) != place(&self.ram, id) {
                let what = format!("its {id} is not where its memory was expected");
                return Err(RestoreError::Blocks { number: self.input.number, what });
            }
        }
        self.ram = Arc::new(reported);
        Ok(())
    }

    /// Returns the injector for the destination. `None` before [`RamSource::connect`].
    pub fn injector(&self) -> Option<Injector> {
        self.connected.as_ref().map(|connected| connected.injector)
    }

    /// Starts or stops the loading of pages in the background, which has lower priority than pages that are waited for.
    pub fn fill_in_background(&self, fill: bool) {
        if let Some(connected) = &self.connected {
            connected.supply.fill_all.store(fill, Ordering::Relaxed);
        }
    }

    /// Returns the stream for the destination. Later calls return an empty stream.
    pub(crate) fn take_stream(&mut self) -> Vec<u8> {
        self.connected.as_mut().map(|connected| std::mem::take(&mut connected.stream)).unwrap_or_default()
    }

    /// Records which pages are missing and where they are, so that a pager process can supply them. From then on the
    /// loaded memory belongs to this VM.
    pub(crate) fn record_fill(
        &mut self,
        rundir: &RunDir,
        vmm: &Vmm,
        store: &StoreUrl,
        credentials: Option<&Credentials>,
    ) -> Result<(), RestoreError> {
        let pager_lock = lock_pager(rundir)?;
        let image = self.input.image()?;
        let paged = self.input.paged.clone();
        Fill::new(store.clone(), credentials, image, vmm.clone(), &self.ram, paged).write(rundir)?;
        if let Some(connected) = &mut self.connected {
            connected.supply.pager_lock = Some(pager_lock);
        }
        Ok(())
    }

    /// Starts the pager process, which replaces the thread of this process. A failure is only logged, because the guest
    /// may run: `rekindle recover` starts another pager.
    pub fn hand_over_to_pager(&mut self, rundir: &RunDir) {
        let Some(ConnectedRam { supply, .. }) = self.connected.take() else { return };
        let ready = UnixStream::pair().and_then(|(ours, theirs)| {
            spawn_pager(rundir, &["--hand-over"], Stdio::from(OwnedFd::from(theirs)))?;
            ours.set_read_timeout(Some(PAGER_START_TIMEOUT))?;
            (&ours).read_exact(&mut [0])
        });
        if let Err(e) = ready {
            let (name, log) = (rundir.name(), log_path(rundir));
            tracing::warn!(
                "cannot start the pager of {name} ({e}; check {}); the guest blocks where it needs a missing page; to \
                 start a pager: rekindle recover {name}",
                log.display()
            );
        }
        match supply.end() {
            Ok(progress) => tracing::debug!("{} pages were supplied before the pager took over", progress.demanded),
            Err(e) => tracing::warn!("{e}"),
        }
    }
}

impl Ram for OnDemandRam {
    /// Adds nothing: whether or not the guest has run, the checkpoint is still in the store.
    fn note_evidence(&self, _operation: &mut Operation) {}
}

impl RamSource for OnDemandRam {
    type Error = RestoreError;

    /// Registers the memory, and puts the pages into it that QEMU reads while it loads the devices. From then on,
    /// access to a missing page blocks until the page is supplied.
    fn connect(&mut self, destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, RestoreError> {
        let (input, ram) = (&self.input, &self.ram);
        let registered = self.registered.take();
        let (stream, registered) = thread::scope(|scope| {
            let stream = scope.spawn(|| input.stream(ram));
            let pages_for_load = scope.spawn(|| input.pages_for_load());
            let mut registered = match registered {
                Some(registered) => registered,
                None => RegisteredMemory::new(destination, qmp, ram, &input.paged)?,
            };
            registered.pager.overwrite_present_pages(ram, &mut UncommittedPages::new(input, ram))?;
            let pages_for_load = pages_for_load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            input.put_pages_for_load(&pages_for_load, ram, &mut registered.pager)?;
            let stream = stream.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok::<_, RestoreError>((stream, registered))
        })?;
        let RegisteredMemory { injector, pager, feed } = registered;
        let supply = PageSupply::start(pager, Arc::clone(&self.input), Arc::clone(&self.ram));
        self.connected = Some(ConnectedRam { injector, stream, supply });
        Ok(feed)
    }
}

/// A thread that supplies the pages that are waited for. Dropping this ends the thread; then access to a missing page
/// blocks.
#[derive(Debug)]
struct PageSupply {
    stop: Arc<AtomicBool>,
    /// Pages are loaded in the background, too.
    fill_all: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Progress, PagerError>>>,
    /// The pager's lock. Set once `fill.json` exists; keeps pager processes from serving meanwhile.
    pager_lock: Option<File>,
}

impl PageSupply {
    /// Starts the thread. It owns the descriptor, so that the descriptor is closed when the thread ends: after the
    /// pager process has ended, access to a zero page would block as long as another descriptor is open.
    fn start(mut pager: Pager, input: Arc<LoadInput>, ram: Arc<GuestRam>) -> Self {
        let (stop, fill_all) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let thread = thread::spawn({
            let (stop, fill_all) = (Arc::clone(&stop), Arc::clone(&fill_all));
            move || pager.run_on_demand(&mut UncommittedPages::new(&input, &ram), &stop, &fill_all)
        });
        Self { stop, fill_all, thread: Some(thread), pager_lock: None }
    }

    /// Ends the thread, and returns what it has loaded.
    fn end(mut self) -> Result<Progress, PagerError> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(Progress::default()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for PageSupply {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Pages of a checkpoint that may not be committed yet.
struct UncommittedPages<'a> {
    input: &'a LoadInput,
    ram: &'a GuestRam,
    /// Set when the checkpoint is committed.
    committed: Option<CheckpointPages<'a>>,
}

impl<'a> UncommittedPages<'a> {
    fn new(input: &'a LoadInput, ram: &'a GuestRam) -> Self {
        Self { input, ram, committed: None }
    }
}

impl PageSource for UncommittedPages<'_> {
    type Error = RestoreError;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, RestoreError> {
        let pages = match &mut self.committed {
            Some(pages) => pages,
            none => none.insert(CheckpointPages::new(self.input.image()?, self.ram, None)),
        };
        Ok(pages.page(block, page, buffer)?)
    }

    fn page_if_ready(
        &mut self,
        block: BlockId,
        page: PageNo,
        buffer: &mut Page,
        need: Need,
    ) -> Result<Option<Content>, RestoreError> {
        let pages = match &mut self.committed {
            Some(pages) => pages,
            none => none.insert(CheckpointPages::new(self.input.image()?, self.ram, None)),
        };
        Ok(pages.page_if_ready(block, page, buffer, need)?)
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        self.committed.as_ref().and_then(PageSource::arrivals)
    }

    fn fetches_ahead(&self) -> bool {
        self.committed.as_ref().is_some_and(PageSource::fetches_ahead)
    }

    fn will_fetch(&mut self, pages: &[PageId]) -> usize {
        self.committed.as_mut().map_or(0, |committed| committed.will_fetch(pages))
    }

    fn retry(&mut self, error: &RestoreError, attempt: u32) -> Option<Duration> {
        match (&mut self.committed, error) {
            (Some(pages), RestoreError::Store(e)) => pages.retry(e, attempt),
            _ => None,
        }
    }
}

/// Starts the pager process.
///
/// # Errors
/// [`RestoreError::Start`]: the process cannot be started.
pub fn start_pager(rundir: &RunDir) -> Result<(), RestoreError> {
    spawn_pager(rundir, &[], Stdio::null()).map_err(|source| RestoreError::Start { name: rundir.name().into(), source })
}

fn spawn_pager(rundir: &RunDir, arguments: &[&str], stdin: Stdio) -> std::io::Result<()> {
    let open_log = || OpenOptions::new().create(true).append(true).mode(0o600).open(log_path(rundir));
    let mut command = this_program()?;
    command.args(["pager"]).args(arguments).arg(rundir.name()).stdout(open_log()?).stderr(open_log()?);
    if let Some(root) = rundir.path().parent() {
        command.env("REKINDLE_RUN_DIR", root);
    }
    detach(&mut command).stdin(stdin).spawn().map(disown)
}

fn log_path(rundir: &RunDir) -> PathBuf {
    rundir.file("pager.log")
}

/// Waits until the pager process has loaded all memory.
pub(crate) fn wait_until_filled(rundir: &RunDir, vmm: &Vmm) -> Result<(), RestoreError> {
    let deadline = Instant::now() + FILL_TIMEOUT;
    while rundir.fill().exists() {
        if !vmm.is_alive() || Instant::now() > deadline {
            let log = last_lines(&log_path(rundir), 10);
            return Err(RestoreError::NotFilled { name: rundir.name().into(), log });
        }
        thread::sleep(FILL_POLL_INTERVAL);
    }
    Ok(())
}
