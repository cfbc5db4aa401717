//! Loads the RAM of a guest while it runs (HydraVM's slim restore, "pages on demand").
//!
//! QEMU starts with empty RAM, and some of its RAM blocks are registered for missing pages. A guest thread that
//! touches a missing page blocks until [`Pager::run`] has fetched the page from a [`PageSource`]. All other pages are
//! filled in the background, in an order that the caller chooses.
//!
//! **If the pager dies**, QEMU still has its own descriptor, so access to a missing page blocks and does not read
//! zeros. [`Pager::take_over`] starts the next pager. It finds the present pages in the memory itself. It wakes blocked
//! threads once, so that they fault again: a fault that the dead pager had read is not reported twice.
//!
//! **Memory that the guest gives back** (balloon) is immediately removed from the registration. From then on it reads
//! as zero, also after another pager took over, and no old content is put into it. (QEMU punches a hole into a shared
//! file before it reports the removal. A page that is filled in between stays: a guest that gives a page back does not
//! need its content.)
//!
//! **A missing page is never replaced with zeros.** A thread that reads it blocks while [`PageSource::retry`] returns a
//! delay. When `retry` returns `None`, [`Pager::run`] ends with an error, everything stays registered, and the thread
//! waits for the next pager.
//!
//! **Writes during the fill** are recorded where the kernel can do so (Linux 6.7): pages are filled write-protected, so
//! "mapped and not protected" means "written since". [`crate::tracker::Filling`] reads that record; [`Completion`]
//! determines when the record ends.
//!
//! When all pages are present, the memory is unregistered first, and QEMU's descriptor is closed afterwards. In the
//! other order the kernel would turn missing pages into zeros.

mod paged;
mod pager;
mod serve;
mod source;

pub(crate) use pager::existing_pager;
pub use pager::{Completion, Pager, PagerError, Progress};
pub use source::{Content, PageSource};
