//! Loads the RAM of a guest while it runs (HydraVM's slim restore, "pages on demand").
//!
//! QEMU starts with empty RAM, and some of its RAM blocks are registered for missing pages. A guest thread that
//! touches a missing page blocks until [`Pager::run`] has fetched the page from a [`PageSource`]. All other pages are
//! filled in the background, in an order that the caller chooses.
//!
//! **If the pager dies**, QEMU still has its own descriptor, so access to a missing page blocks and does not read
//! zeroes.
//! [`Pager::take_over`] continues: it finds the present pages in the memory itself, and wakes blocked threads once so
//! that they fault again, because a fault that the dead pager had read is not reported twice.
//!
//! **Memory that the guest gives back** (balloon) is immediately removed from the registration: it reads as zero from
//! then on, also after another pager took over, and no old content is put there. (QEMU punches a hole into a shared
//! file before it reports this. A page that is filled in between stays: a guest that gives a page back does not need
//! its content.)
//!
//! **A missing page is never replaced with zeroes.** Its reader blocks while [`PageSource::retry`] returns a delay.
//! When it returns `None`, [`Pager::run`] ends with an error, everything stays registered, and the reader waits for
//! the next pager.
//!
//! **Writes during the fill** are recorded where the kernel can do so (Linux 6.7): pages are filled write-protected, so
//! "mapped and not protected" means "written since". [`crate::tracker::Filling`] reads that record; [`Completion`]
//! determines when it ends.
//!
//! When all pages are present, first the memory is unregistered and then QEMU's descriptor is closed. In the other
//! order the kernel would turn missing pages into zeroes.

mod paged;
mod pager;
mod serve;
mod source;

pub(crate) use pager::existing_pager;
pub use pager::{Completion, Pager, PagerError, Progress};
pub use source::{Content, PageSource};
