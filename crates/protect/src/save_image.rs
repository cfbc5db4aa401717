//! Writes a checkpoint of a libvirt domain as libvirt's save image, so that `virsh restore` resumes the guest.

use crate::epochs;
use crate::recipe::{Recipe, RecipeError};
use rekindle_libvirt::save_image;
use rekindle_store::export::{ExportError, export};
use rekindle_store::{Image, StoreError};
use std::io::Write;

/// Why a checkpoint cannot be written as a save image.
#[derive(Debug, thiserror::Error)]
pub enum SaveImageError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(
        "checkpoint {number} does not have libvirt's description of a domain: it is of a guest that was not attached with \
         --libvirt, or by an older Rekindle; to restore it without libvirt: \
         rekindle restore"
    )]
    NoDomain { number: u64 },
    /// libvirt would open the images without the overlays: disks of another time.
    #[error(
        "the disks of checkpoint {number} are on overlays, of which libvirt does not know; to restore it with them: \
         rekindle restore --into-libvirt"
    )]
    OnOverlays { number: u64 },
    #[error("libvirt's description of the domain is too long for a save image: {bytes} bytes")]
    TooLong { bytes: usize },
}

/// Writes `image` to `out` as a save image. `progress` gets the bytes of RAM done and in total. Returns the number of
/// bytes written.
///
/// # Errors
/// [`SaveImageError`]. libvirt rejects an incomplete image.
pub fn write(image: &Image, out: &mut dyn Write, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, SaveImageError> {
    let number = image.info().number;
    let recipe = Recipe::read(&image.definition()?)?;
    if !epochs::read_overlays(&image.metadata()?).map_err(RecipeError::Malformed)?.is_empty() {
        return Err(SaveImageError::OnOverlays { number });
    }
    let xml = recipe.domain_xml().ok_or(SaveImageError::NoDomain { number })?;
    let header = header(xml)?;
    out.write_all(&header).map_err(ExportError::Write)?;
    let written = export(image, out, Some(recipe.machine()), progress)?;
    Ok(header.len() as u64 + written)
}

/// Returns what a save image of the domain that `xml` describes has before QEMU's stream.
pub(crate) fn header(xml: &str) -> Result<Vec<u8>, SaveImageError> {
    save_image::header(xml, true).map_err(|bytes| SaveImageError::TooLong { bytes })
}
