//! Bringing the pages of a guest while it runs already (HydraVM's slim restore, "pages on demand").
//!
//! A QEMU that waits with empty RAM has some of its RAM blocks registered for missing pages. A guest that touches one waits
//! until [`Pager::run`] has fetched it from a [`PageSource`]; all others come behind, in an order of the caller's.
//!
//! **When the pager dies** QEMU keeps its own descriptor, so that who touches a missing page waits, and does not find
//! zeroes. [`Pager::take_over`] goes on: which pages are there is told by the memory itself, and waiting threads are woken
//! once to ask again, since a fault that the dead pager had read is not told twice.
//!
//! **Memory given back** (balloon) meanwhile is taken out of the registration at once: it reads as zero from then on, also
//! after another pager took over, and nothing old is put there. (QEMU punches a shared file before it says so. What is
//! brought in between stays: a guest that gives a page back does not need what is in it.)
//!
//! **A page that cannot be had is never zero.** Its reader waits as long as [`PageSource::retry`] says; when that gives up,
//! [`Pager::run`] ends with an error, everything stays registered, and its reader waits on for the next pager.
//!
//! **What is written meanwhile** is recorded where the kernel can (Linux 6.7): pages come write-protected, so that "mapped and
//! not protected" means "written since". [`crate::tracker::Filling`] reads that record; [`Last`] says when it may end.
//!
//! When the last page is there, the registration goes, and then QEMU's descriptor: in this order, because closing the
//! descriptor turns what is missing into zeroes.

mod paged;
mod pager;
mod serve;
mod source;

pub(crate) use pager::left;
pub use pager::{Last, Pager, PagerError, Progress};
pub use source::{Content, Page, PageSource};
