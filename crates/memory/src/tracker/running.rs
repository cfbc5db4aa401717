//! Tracking a guest that is not stopped, so that its RAM can be copied while it runs.
//!
//! Disk requests in flight are the difficulty: a page that was pinned for a disk read (`O_DIRECT`) is written without a
//! fault, so its write is not recorded. The order *protect, then drain, then copy* is correct nevertheless:
//!
//! - A page that was pinned before it was protected counted as written, since pinning it was a fault, or it was
//!   populated before the first protection. Either way it is among the pages to copy. The drain waits until the disk
//!   has written it, and the copy comes later.
//! - Pinning a protected page is a fault, which records the page for the next collection.
//!
//! [`UndrainedDirty`] enforces this order: the pages that are to be copied are known only after the drain.

use super::Dirty;
use rekindle_qemu::drain;
use rekindle_qemu::qmp::{Qmp, QmpError};

/// Pages that are to be copied after the block I/O in flight has completed. They are protected again already.
#[derive(Debug)]
#[must_use = "the pages are protected again, so they are lost unless they are copied"]
pub struct UndrainedDirty(Dirty);

impl UndrainedDirty {
    pub(super) fn new(dirty: Dirty) -> Self {
        Self(dirty)
    }

    /// Waits for the block I/O in flight. Returns the pages to copy.
    ///
    /// # Errors
    /// If QEMU does not answer. The record of these pages is lost, so all pages count as written.
    pub fn drain(self, qmp: &mut Qmp) -> Result<Dirty, QmpError> {
        self.after(|| drain::drain(qmp))
    }

    /// Returns the pages to copy of a process that is not a QEMU, and has no disk requests.
    #[must_use]
    pub fn vouched(self) -> Dirty {
        self.0
    }

    fn after<E>(self, drain: impl FnOnce() -> Result<(), E>) -> Result<Dirty, E> {
        drain().map(|()| self.0)
    }
}

#[cfg(test)]
mod tests {
    //! A model of one page, a disk that writes it, and the copier, whose threads `shuttle` runs in many orders.

    use super::*;
    use rekindle_pages::{PAGE_SIZE, PageRuns};
    use shuttle::sync::{Arc, Condvar, Mutex};
    use shuttle::thread;

    /// Orders in which each test runs the threads.
    const ORDERS: usize = 2000;
    /// Disk reads into the page.
    const READS: u32 = 2;

    #[derive(Default)]
    struct Page {
        content: u32,
        is_written: bool,
        reads_in_flight: u32,
        has_disk_ended: bool,
    }

    #[derive(Default)]
    struct Guest {
        page: Mutex<Page>,
        completed: Condvar,
    }

    impl Guest {
        fn read_disk(&self) {
            for content in 1..=READS {
                {
                    let mut page = self.page.lock().unwrap();
                    page.reads_in_flight += 1;
                    // Pinning the page is a write fault, which removes its protection.
                    page.is_written = true;
                }
                thread::yield_now();
                let mut page = self.page.lock().unwrap();
                page.content = content;
                page.reads_in_flight -= 1;
                self.completed.notify_all();
            }
            self.page.lock().unwrap().has_disk_ended = true;
            self.completed.notify_all();
        }

        fn collect(&self) -> UndrainedDirty {
            let mut written = PageRuns::new();
            if std::mem::take(&mut self.page.lock().unwrap().is_written) {
                written.push(0..PAGE_SIZE as u64);
            }
            UndrainedDirty::new(Dirty { written: vec![written], zero: vec![PageRuns::new()] })
        }

        fn drain(&self) -> Result<(), QmpError> {
            let page = self.page.lock().unwrap();
            drop(self.completed.wait_while(page, |page| page.reads_in_flight > 0).unwrap());
            Ok(())
        }

        fn copy(&self, dirty: &Dirty, copy: &mut u32) {
            if dirty.bytes() > 0 {
                *copy = self.page.lock().unwrap().content;
            }
        }
    }

    /// Copies the page in two rounds while the guest runs and once after its stop, and compares it.
    fn copy_while_the_disk_writes(drain: impl Fn(&Guest) -> Result<(), QmpError>) {
        let guest = Arc::new(Guest::default());
        let disk = thread::spawn({
            let guest = Arc::clone(&guest);
            move || guest.read_disk()
        });
        let mut copy = 0;
        for _ in 0..2 {
            let dirty = guest.collect().after(|| drain(&guest)).unwrap();
            guest.copy(&dirty, &mut copy);
        }
        // The stop of the guest waits for the disk.
        let page = guest.page.lock().unwrap();
        drop(guest.completed.wait_while(page, |page| !page.has_disk_ended).unwrap());
        guest.copy(&guest.collect().vouched(), &mut copy);
        disk.join().unwrap();
        assert_eq!(copy, guest.page.lock().unwrap().content, "the copy is not the page");
    }

    #[test]
    fn no_order_of_the_disks_writes_makes_the_copy_wrong() {
        shuttle::check_random(|| copy_while_the_disk_writes(Guest::drain), ORDERS);
    }

    #[test]
    #[should_panic(expected = "the copy is not the page")]
    fn without_the_drain_the_model_finds_a_wrong_copy() {
        shuttle::check_random(|| copy_while_the_disk_writes(|_| Ok(())), ORDERS);
    }
}
