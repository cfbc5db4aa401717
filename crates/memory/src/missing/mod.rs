//! Loads the RAM of a guest while it runs (HydraVM's slim restore, "pages on demand").
//!
//! **Problem.** A restored guest must not wait until all of its memory is loaded. So QEMU starts with empty RAM, whose
//! pages are *missing*: some of its RAM blocks are registered with a userfaultfd, and a thread that touches a missing
//! page blocks. [`Pager::run`] fetches that page from a [`PageSource`], and fills all others in the background, in an
//! order that the caller chooses.
//!
//! **Promise.** A missing page is never replaced with zeros: the thread waits. What can happen meanwhile:
//!
//! | event | what the guest sees | how |
//! |---|---|---|
//! | the source fails | the thread waits while [`PageSource::retry`] returns a delay | when it returns `None`, [`Pager::run`] ends with an error, everything stays registered, and the thread waits for the next pager |
//! | a page is on its way from another host | the thread waits | meanwhile the pager serves other faults: [`PageSource::page_if_ready`], [`PageSource::arrivals`] |
//! | the pager dies | the thread waits | QEMU has a descriptor of its own, which keeps the registration; [`Pager::take_over`] starts the next pager, which finds the present pages in the memory, and wakes blocked threads once: they fault again, since a fault that the dead pager has read is not reported twice |
//! | the guest gives memory back (balloon) | zeros, also with the next pager | the memory is removed from the registration immediately, and no old content is put into it |
//! | the guest writes during the fill | nothing | pages are filled write-protected (Linux 6.7), so "mapped and not protected" means "written since": [`crate::tracker::Filling`] reads that record, and [`Completion`] determines when it ends |
//! | all pages are present | nothing | the memory is unregistered first, and QEMU's descriptor is closed afterwards: in the other order the kernel would turn missing pages into zeros |
//!
//! QEMU punches a hole into a shared file before it reports that memory was given back. A page that is filled in between
//! stays: a guest that gives a page back does not need its content.

mod paged;
mod pager;
mod serve;
mod source;

pub(crate) use pager::existing_pager;
pub use pager::{Completion, Pager, PagerError, Progress};
pub use rekindle_kernel::userfault::remote::Registration;
pub use source::{Content, Need, PageSource};
