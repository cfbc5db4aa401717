//! Memory of a guest that a restore is still filling (HydraVM, section IV-B): access to a missing page blocks until
//! it is filled.
//!
//! In QEMU's mapping, the pager's userfaultfd handles missing pages. This process has its own mapping, in which
//! missing pages would read as zeros. Therefore it has its own userfaultfd: when a page is missing in this process, a
//! thread reads the page from QEMU's memory, which blocks until the pager has filled it. Then the page is in the file
//! that both processes map.
//!
//! ```text
//! engine ── accesses a page ──> this thread ── reads it in QEMU ──> pager fills it
//!        <── continues ──────── wake <───────── done
//! ```

use crate::broker::FrontEndMemory;
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::{Event, Mode, Userfault, UserfaultError};
use rekindle_pages::PAGE_SIZE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Interval between two attempts to read a page from QEMU.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const PAGE: u64 = PAGE_SIZE as u64;

/// Memory that this process and another process map.
#[derive(Debug, Clone)]
pub struct DoubleMapping {
    /// Addresses in this process.
    pub ours: Range<u64>,
    /// First address in the other process.
    pub theirs: u64,
}

/// The part of a guest's memory in which access to a missing page blocks, and the thread that supplies the pages.
#[derive(Debug)]
pub struct MissingPages {
    faults: Arc<Userfault>,
    mappings: Vec<DoubleMapping>,
    /// Readable when the thread is to end.
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl MissingPages {
    /// Starts to block each access to a missing page of `mappings` until the process `front_end` has the page.
    ///
    /// # Errors
    /// Errors of `userfaultfd(2)`, also if it is unavailable. Access does not block then, so the memory must not be
    /// used.
    pub fn begin(mappings: Vec<DoubleMapping>, front_end: Process, memory: FrontEndMemory) -> io::Result<Self> {
        let faults = Arc::new(memory.userfault().map_err(io::Error::other)?);
        for mapping in &mappings {
            faults.register(mapping.ours.clone(), Mode::MISSING).map_err(io::Error::other)?;
        }
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (thread_faults, thread_mappings, thread_end) = (Arc::clone(&faults), mappings.clone(), Arc::clone(&end));
        let thread = thread::Builder::new().name("missing pages".into()).spawn(move || {
            if let Err(e) = supply_pages(&thread_faults, &thread_mappings, &thread_end, front_end, &memory) {
                // Blocked accesses stay blocked.
                tracing::error!("missing pages of the guest can no longer be supplied: {e}");
            }
        })?;
        Ok(Self { faults, mappings, end, thread: Some(thread) })
    }

    /// Stops blocking accesses, because no page is missing any more.
    pub fn set_filled(&self) {
        for mapping in &self.mappings {
            if let Err(e) = self.faults.unregister(mapping.ours.clone()) {
                tracing::debug!("cannot stop watching for missing pages: {e}");
            }
        }
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Supplies missing pages until `end` is readable.
fn supply_pages(
    faults: &Userfault,
    mappings: &[DoubleMapping],
    end: &OwnedFd,
    front_end: Process,
    memory: &FrontEndMemory,
) -> Result<(), UserfaultError> {
    let failed = |source: rustix::io::Errno| UserfaultError::Descriptor { what: "wait", source: source.into() };
    loop {
        let mut ready = [PollFd::new(faults, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled.map_err(failed)?,
        };
        if !ready[1].revents().is_empty() {
            return Ok(());
        }
        for event in faults.events()? {
            let Event::Fault { address, .. } = event else { continue };
            let page = address - address % PAGE;
            if let Some(mapping) = mappings.iter().find(|mapping| mapping.ours.contains(&page)) {
                fetch_page(memory, front_end, mapping.theirs + (page - mapping.ours.start));
            }
            faults.wake(page..page + PAGE)?;
        }
    }
}

/// Makes the process `front_end` fetch the page at `address`: reading the page blocks until the pager has filled it.
fn fetch_page(memory: &FrontEndMemory, front_end: Process, address: u64) {
    let mut is_reported = false;
    while let Err(e) = memory.touch(front_end, address) {
        if !memory.is_alive(front_end) {
            // The guest has ended, and an access that is blocked cannot be made to fail. Zeros must not be supplied:
            // they could reach the disk.
            tracing::error!("QEMU ended before its guest's memory was filled; this server ends, too");
            std::process::exit(1);
        }
        if !std::mem::replace(&mut is_reported, true) {
            tracing::error!("cannot supply a page of the guest, so its disk waits: {e}");
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::memory::{Memory, Region};
    use rekindle_kernel::userfault::Features;
    use std::fs::File;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Maps the pages of a file as QEMU would, and calls `work` with their address. Fills each page with its number
    /// plus one when it is needed, as a pager would. Returns the number of filled pages.
    fn with_pager(file: &File, work: impl FnOnce(u64)) -> u64 {
        const PAGES: u64 = 16;
        let theirs = map_file(file, PAGES * PAGE);
        let faults = Userfault::own(Features::empty()).unwrap();
        faults.register(theirs..theirs + PAGES * PAGE, Mode::MISSING).unwrap();
        let (supplied, done) = (AtomicU64::new(0), eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let mut ready = [PollFd::new(&faults, PollFlags::IN), PollFd::new(&done, PollFlags::IN)];
                    poll(&mut ready, None).unwrap();
                    if !ready[1].revents().is_empty() {
                        break;
                    }
                    for event in faults.events().unwrap() {
                        let Event::Fault { address, .. } = event else { continue };
                        let number = (address - theirs) / PAGE;
                        supplied.fetch_add(1, Ordering::Relaxed);
                        faults.copy(address - address % PAGE, &[number as u8 + 1; PAGE as usize], true).unwrap();
                    }
                }
            });
            work(theirs);
            rustix::io::write(&done, &1u64.to_ne_bytes()).unwrap();
        });
        supplied.load(Ordering::Relaxed)
    }

    fn map_file(file: &File, bytes: u64) -> u64 {
        let region = vm_memory::mmap::MmapRegion::<()>::from_file(
            vm_memory::FileOffset::new(file.try_clone().unwrap(), 0),
            bytes as usize,
        );
        let region = Box::leak(Box::new(region.unwrap()));
        region.as_ptr() as u64
    }

    #[test]
    fn access_to_a_missing_page_waits_until_it_is_filled() {
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(16 * PAGE).unwrap();
        let supplied = with_pager(&file, |theirs| {
            let me = Process::of(std::process::id()).unwrap();
            let region = Region {
                address: 0,
                bytes: 16 * PAGE,
                file: file.try_clone().unwrap(),
                offset: 0,
                front_end_address: theirs,
            };
            let memory = Memory::map_missing(vec![region], me, FrontEndMemory::default()).unwrap();
            let mut bytes = [0; 10];
            memory.read(3 * PAGE - 5, &mut bytes).unwrap();
            assert_eq!(bytes, [3, 3, 3, 3, 3, 4, 4, 4, 4, 4]);
            // Writes of a part of a page, also within a longer write. The rest of the page keeps the pager's content.
            memory.write(7 * PAGE + 1, &[99]).unwrap();
            memory.fill(9 * PAGE + 8, &[98; 4]).unwrap();
            memory.read(7 * PAGE, &mut bytes).unwrap();
            assert_eq!(bytes, [8, 99, 8, 8, 8, 8, 8, 8, 8, 8]);
            memory.read(9 * PAGE + 6, &mut bytes).unwrap();
            assert_eq!(bytes, [10, 10, 98, 98, 98, 98, 10, 10, 10, 10]);
            memory.set_filled();
            memory.read(3 * PAGE, &mut bytes).unwrap();
            assert_eq!(bytes, [4; 10]);
        });
        assert_eq!(supplied, 4, "each needed page once");
    }
}
