//! The start of libvirt's save image: the file that `virsh save` writes and `virsh restore` reads.
//!
//! ```text
//!  magic   version  length of the XML  was it running  compression  (unused)   XML, 0   QEMU's migration stream
//!  16 B    4 B      4 B                4 B             4 B          60 B
//! ```
//!
//! Numbers are in the byte order of the host. libvirt's source has the format in `qemu_saveimage.h`, version 2.

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
const VERSION: u32 = 2;
const NOT_COMPRESSED: u32 = 0;
/// Position of the cookie, which no other program than libvirt needs, and unused numbers.
const REST: [u8; 60] = [0; 60];

/// Returns what a save image has before QEMU's stream. `xml`: the domain, as libvirt sends it to another host in a
/// migration. libvirt resumes the guest (`was_running`) or leaves it paused.
///
/// # Errors
/// The length of an XML that the format cannot have.
pub fn header(xml: &str, was_running: bool) -> Result<Vec<u8>, usize> {
    // With the zero at its end.
    let length = u32::try_from(xml.len() + 1).map_err(|_| xml.len())?;
    let numbers = [VERSION, length, u32::from(was_running), NOT_COMPRESSED].map(u32::to_ne_bytes);
    Ok([MAGIC, numbers.as_flattened(), &REST, xml.as_bytes(), b"\0"].concat())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_stream_follows_a_header_of_92_bytes_and_the_xml() {
        let header = header("<domain/>", true).unwrap();
        assert_eq!(header.len(), 92 + "<domain/>".len() + 1);
        assert_eq!(&header[..16], MAGIC);
        assert_eq!(header[16..32], [2_u32, 10, 1, 0].map(u32::to_ne_bytes).concat());
        assert_eq!(&header[92..], b"<domain/>\0");
    }
}
