//! RAM that the kernel does not use: `memmap=SIZE!START` on the host's command line, and the device that Linux creates
//! for it.

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Preferred alignment of a range: the size that one entry of the kernel's page table can map.
const PREFERRED_ALIGNMENT_BYTES: u64 = 1 << 30;
/// Minimum alignment: Linux adds memory to its map in sections of this size.
const MIN_ALIGNMENT_BYTES: u64 = 128 << 20;
/// Minimum that is left to the host if all of its RAM is in the range from which RAM is reserved.
const MIN_HOST_BYTES: u64 = 1 << 30;
/// Memory below this address is needed by 32-bit devices, and by kernels at their start.
const FOUR_GIB: u64 = 4 << 30;

/// A range of physical addresses that is reserved from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserve {
    pub start: u64,
    pub bytes: u64,
}

impl std::fmt::Display for Reserve {
    /// Formats the range as the kernel's parameter.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "memmap={}M!{}M", self.bytes >> 20, self.start >> 20)
    }
}

impl Reserve {
    /// Parses the range that a kernel's command line reserves.
    #[must_use]
    pub fn of(command_line: &str) -> Option<Self> {
        let words = command_line.split_whitespace().filter_map(|word| word.strip_prefix("memmap="));
        words.flat_map(|word| word.split(',')).find_map(|range| {
            let (bytes, start) = range.split_once('!')?;
            Some(Self { start: parse_size(start)?, bytes: parse_size(bytes)? })
        })
    }

    /// Chooses the range of `bytes`: at the end of the highest RAM, or at `start`.
    ///
    /// # Errors
    /// A text that states why no such range exists.
    pub fn choose(ram: &[Range<u64>], bytes: u64, start: Option<u64>) -> Result<Self, String> {
        let size = mib(bytes);
        if bytes == 0 || !bytes.is_multiple_of(MIN_ALIGNMENT_BYTES) {
            let unit = mib(MIN_ALIGNMENT_BYTES);
            return Err(format!("cannot reserve {size}: the size must be a multiple of {unit}"));
        }
        let total: u64 = ram.iter().map(|range| range.end - range.start).sum();
        if bytes + MIN_HOST_BYTES > total {
            return Err(format!(
                "cannot reserve {size}: this machine has {}, of which the host needs at least {}",
                mib(total),
                mib(MIN_HOST_BYTES)
            ));
        }
        match start {
            Some(start) => Self::choose_at(ram, bytes, start),
            None => Self::choose_highest(ram, bytes),
        }
    }

    fn choose_at(ram: &[Range<u64>], bytes: u64, start: u64) -> Result<Self, String> {
        let is_ram = ram.iter().any(|range| range.start <= start && start + bytes <= range.end);
        if is_ram && start.is_multiple_of(MIN_ALIGNMENT_BYTES) && start >= FOUR_GIB {
            return Ok(Self { start, bytes });
        }
        Err(format!(
            "cannot reserve {} at {start:#x}: the range must be RAM, above 4 GiB, at a multiple of {}",
            mib(bytes),
            mib(MIN_ALIGNMENT_BYTES)
        ))
    }

    /// Chooses the end of the highest RAM, with the best alignment that fits.
    fn choose_highest(ram: &[Range<u64>], bytes: u64) -> Result<Self, String> {
        let above_4_gib = ram.iter().filter(|range| range.end > FOUR_GIB);
        let highest = above_4_gib.max_by_key(|range| range.end).map(|range| range.start.max(FOUR_GIB)..range.end);
        if let Some(highest) = &highest
            && let Some(last_start) = highest.end.checked_sub(bytes)
        {
            for alignment in [PREFERRED_ALIGNMENT_BYTES, MIN_ALIGNMENT_BYTES] {
                let start = last_start - last_start % alignment;
                if start >= highest.start {
                    return Ok(Self { start, bytes });
                }
            }
        }
        Err(format!(
            "cannot reserve {}: the highest range of RAM above 4 GiB has {}; reserve less, or choose another range \
             with --start",
            mib(bytes),
            mib(highest.map_or(0, |range| range.end - range.start))
        ))
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Parses a size as the kernel does: decimal or `0x`, with K, M, G or T.
fn parse_size(text: &str) -> Option<u64> {
    let (number, shift) = match text.chars().last()?.to_ascii_uppercase() {
        'K' => (text.get(..text.len() - 1)?, 10),
        'M' => (text.get(..text.len() - 1)?, 20),
        'G' => (text.get(..text.len() - 1)?, 30),
        'T' => (text.get(..text.len() - 1)?, 40),
        _ => (text, 0),
    };
    let value = match number.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => number.parse::<u64>().ok()?,
    };
    value.checked_mul(1 << shift)
}

/// Returns the machine's RAM as reported by its firmware, independent of reservations.
///
/// # Errors
/// Errors of reading `/sys/firmware/memmap`, which is missing without `CONFIG_FIRMWARE_MEMMAP`.
pub fn firmware_ram(sys: &Path) -> io::Result<Vec<Range<u64>>> {
    let mut ram = Vec::new();
    for entry in fs::read_dir(sys.join("firmware/memmap"))? {
        let range = entry?.path();
        let read = |name: &str| fs::read_to_string(range.join(name)).map(|text| text.trim().to_owned());
        let address = |name: &str| read(name).map(|text| parse_size(&text).unwrap_or(0));
        if read("type")? == "System RAM" {
            ram.push(address("start")?..address("end")? + 1);
        }
    }
    ram.sort_by_key(|range| range.start);
    Ok(ram)
}

/// Returns the device that Linux has created for a reserve: a *legacy* persistent memory device at its address. Never
/// returns a device that is really persistent, which may hold other data.
///
/// # Errors
/// Errors of reading `/sys/block`.
pub fn find_device(sys: &Path, reserve: Reserve) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir(sys.join("block")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with("pmem") {
            continue;
        }
        let sys_directory = fs::canonicalize(entry.path().join("device"))?;
        let is_legacy =
            sys_directory.components().any(|part| part.as_os_str().to_string_lossy().starts_with("e820_pmem"));
        let resource = fs::read_to_string(sys_directory.join("resource")).ok();
        let address = resource.and_then(|text| parse_size(text.trim()));
        if is_legacy && address == Some(reserve.start) {
            return Ok(Some(Path::new("/dev").join(name)));
        }
    }
    Ok(None)
}

/// Returns whether the file or directory at `path` is in this host's reserved memory, mapped directly (DAX).
///
/// # Errors
/// Errors of reading `/proc` and `/sys`, and of inspecting `path`.
pub fn holds(path: &Path) -> io::Result<bool> {
    let Some(reserve) = Reserve::of(&fs::read_to_string("/proc/cmdline")?) else { return Ok(false) };
    let Some(device) = find_device(Path::new("/sys"), reserve)? else { return Ok(false) };
    let metadata = fs::metadata(path)?;
    if fs::metadata(&device)?.rdev() != metadata.dev() {
        return Ok(false);
    }
    if metadata.is_file() {
        let attributes = statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS)?.stx_attributes;
        return Ok(attributes.contains(StatxAttributes::DAX));
    }
    // Directories do not have this attribute, so check the mount options.
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(mounts.lines().any(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        let [source, _, _, options, ..] = fields.as_slice() else { return false };
        Path::new(source) == device && options.split(',').any(|option| ["dax", "dax=always"].contains(&option))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_reserve_is_parsed_and_printed_as_the_kernel_does() {
        for text in ["quiet memmap=1G!4G ro", "memmap=0x40000000!4096M", "memmap=64K$1M,1048576K!0x100000000"] {
            assert_eq!(Reserve::of(text), Some(Reserve { start: 4 * GIB, bytes: GIB }), "{text}");
        }
        for text in ["", "memmap=1G", "memmap=1G@4G", "memmap=x!4G", "xmemmap=1G!4G"] {
            assert_eq!(Reserve::of(text), None, "{text}");
        }
        let reserve = Reserve { start: 6 * GIB, bytes: 3 * GIB / 2 };
        assert_eq!(Reserve::of(&reserve.to_string()), Some(reserve));
    }

    #[test]
    fn the_end_of_the_highest_ram_is_reserved() {
        let low = 0x10_0000..2 * GIB;
        let ram = [low.clone(), 4 * GIB..8 * GIB - (100 << 20)];
        let choose = |bytes, start| Reserve::choose(&ram, bytes, start);
        assert_eq!(choose(GIB, None), Ok(Reserve { start: 6 * GIB, bytes: GIB }));
        // The range is aligned to less than a GiB if whole GiB do not fit.
        let whole_range = choose(4 * GIB - (128 << 20), None).unwrap();
        assert_eq!(whole_range.start, 4 * GIB);
        assert_eq!(choose(GIB, Some(5 * GIB)), Ok(Reserve { start: 5 * GIB, bytes: GIB }));
        for (bytes, start) in [(0, None), (GIB + 4096, None), (5 * GIB, None), (9 * GIB, None), (GIB, Some(2 * GIB))] {
            assert!(choose(bytes, start).is_err(), "{bytes} at {start:?}");
        }
        assert!(choose(GIB, Some(7 * GIB)).unwrap_err().contains("above 4 GiB"));
        assert!(Reserve::choose(&[low], GIB / 2, None).is_err(), "nothing above 4 GiB");
    }

    #[test]
    fn only_a_legacy_device_at_that_address_is_accepted() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        let reserve = Reserve { start: 4 * GIB, bytes: GIB };
        assert_eq!(find_device(sys, reserve).unwrap(), None);
        let make = |name: &str, parent: &str, address: &str| {
            let device = sys.join(format!("devices/{parent}/{name}"));
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("resource"), address).unwrap();
            fs::create_dir_all(sys.join("block").join(name)).unwrap();
            std::os::unix::fs::symlink(&device, sys.join("block").join(name).join("device")).unwrap();
        };
        make("pmem0", "LNXSYSTM:00/ndbus0/region0", "0x100000000\n");
        make("pmem1", "platform/e820_pmem/ndbus1/region1", "0x200000000\n");
        assert_eq!(find_device(sys, reserve).unwrap(), None, "one is a real one, the other elsewhere");
        make("pmem2", "platform/e820_pmem/ndbus1/region2", "0x100000000\n");
        assert_eq!(find_device(sys, reserve).unwrap(), Some("/dev/pmem2".into()));
    }

    #[test]
    fn files_of_this_machine_are_not_in_reserved_memory() {
        assert!(!holds(Path::new("/proc/self/exe")).unwrap_or(false));
    }
}
