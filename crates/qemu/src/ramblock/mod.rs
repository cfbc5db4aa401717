//! The RAM blocks of a running QEMU.
//!
//! A guest's memory is more than its RAM. Firmware, option ROMs, ACPI tables and video memory are RAM blocks too, and
//! a guest may have changed any of them. `info ramblock` lists all of them. Since about QEMU 8 it also prints the
//! address at which each is mapped in QEMU (`HVA`); for older versions [`locate()`] finds the addresses.

mod locate;

pub(crate) use locate::host_address;
pub use locate::{LocateError, locate};

use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};

/// Id of the guest's main RAM: the `id=` of its memory backend on the command lines that Rekindle writes.
pub const MAIN_RAM: &str = "ram";

/// One RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// QEMU's name for the block, the same in every QEMU with the same hardware.
    pub id: String,
    /// Bytes in use. Firmware tables are resizable: they may use less than the block's size.
    pub used: u64,
    /// Bytes that are mapped, up to which the block may grow.
    pub total: u64,
    /// Page size in the host, in bytes: 4 KiB, or more with hugetlbfs.
    pub page_size: u64,
    /// Offset in QEMU's address space of all RAM blocks.
    pub offset: u64,
    /// Address in the QEMU process, if known.
    pub address: Option<u64>,
}

/// Queries the RAM blocks of a QEMU.
///
/// # Errors
/// When QEMU does not answer, or prints something other than its block table.
pub fn list(qmp: &mut Qmp) -> Result<Vec<RamBlock>, QmpError> {
    let text = qmp.human("info ramblock")?;
    parse(&text)
        .ok_or_else(|| QmpError::Protocol { during: "info ramblock".into(), text: text.chars().take(200).collect() })
}

/// Parses the table. After a header line, a row is: name, page size and its unit, offset, used, total [, address,
/// access].
fn parse(text: &str) -> Option<Vec<RamBlock>> {
    let mut lines = text.lines();
    lines.next().filter(|header| header.trim_start().starts_with("Block Name"))?;
    lines.filter(|line| !line.trim().is_empty()).map(parse_row).collect()
}

fn parse_row(row: &str) -> Option<RamBlock> {
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    // Parse from the right: a name may contain blanks.
    let mut words: Vec<&str> = row.split_whitespace().collect();
    if matches!(words.last(), Some(&("rw" | "ro"))) {
        words.pop();
    }
    let number_count = words.iter().rev().take_while(|word| word.starts_with("0x")).count();
    let (name_and_page_size, numbers) = words.split_at(words.len() - number_count);
    let (offset, used, total, address) = match numbers {
        [offset, used, total] => (hex(offset)?, hex(used)?, hex(total)?, None),
        [offset, used, total, address] => (hex(offset)?, hex(used)?, hex(total)?, Some(hex(address)?)),
        _ => return None,
    };
    let (name, [page_size, unit]) = name_and_page_size.split_last_chunk::<2>()?;
    let page_size = page_size.parse::<u64>().ok()? * unit_bytes(unit)?;
    Some(RamBlock { id: name.join(" "), used, total, page_size, offset, address })
}

fn unit_bytes(unit: &str) -> Option<u64> {
    match unit {
        "B" => Some(1),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_WITH_ADDRESSES: &str = "\
              Block Name    PSize              Offset               Used              Total                HVA  RO
                     ram    4 KiB  0x0000000000000000 0x0000000020000000 0x0000000020000000 0x00007ff4bffff000  rw
    /rom@etc/acpi/tables    4 KiB  0x0000000021100000 0x0000000000020000 0x0000000000200000 0x00007ff4bdc00000  ro
";
    const TABLE_WITHOUT_ADDRESSES: &str = "\
              Block Name    PSize              Offset               Used              Total
                     ram    4 KiB  0x0000000000000000 0x0000000020000000 0x0000000020000000
    /rom@etc/acpi/tables    4 KiB  0x0000000021100000 0x0000000000020000 0x0000000000200000
";

    #[test]
    fn both_forms_of_the_table() {
        let acpi_tables = |address| RamBlock {
            id: "/rom@etc/acpi/tables".into(),
            used: 0x20000,
            total: 0x20_0000,
            page_size: 4096,
            offset: 0x2110_0000,
            address,
        };
        let blocks = parse(TABLE_WITH_ADDRESSES).unwrap();
        let main_ram = RamBlock {
            id: "ram".into(),
            used: 0x2000_0000,
            total: 0x2000_0000,
            page_size: 4096,
            offset: 0,
            address: Some(0x7ff4_bfff_f000),
        };
        assert_eq!(blocks[0], main_ram);
        assert_eq!(blocks[1], acpi_tables(Some(0x7ff4_bdc0_0000)));
        assert_eq!(parse(&TABLE_WITH_ADDRESSES.replace("4 KiB", "2 MiB")).unwrap()[0].page_size, 2 << 20);
        let blocks = parse(TABLE_WITHOUT_ADDRESSES).unwrap();
        assert_eq!(blocks[1], acpi_tables(None));
        assert_eq!(blocks.len(), 2);
    }

    #[test]
    fn anything_else_is_refused() {
        assert_eq!(parse("unknown command: 'info ramblock'\n"), None);
        assert_eq!(parse(&TABLE_WITH_ADDRESSES.replace("0x0000000000020000", "many")), None);
    }
}
