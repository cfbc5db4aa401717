//! A guest, its log, and the guarantees for its disk. The steps are those of the engine and the keeper, on a disk in
//! memory.

use crate::image::Durability;
use crate::redo::directory::{LogDirectory, last_used_epoch};
use crate::redo::error::RedoError;
use crate::redo::files::{Synced, read_unaligned};
use crate::redo::format::{EntryKind, PAGE_BYTES};
use crate::redo::index::{LocatedPiece, Source};
use crate::redo::log::seal::SealRecord;
use crate::redo::log::{Log, LogEntry, ReclaimedSpace, SpaceLimit, SyncOutcome};
use crate::redo::merge::{MergeTarget, merge};
use crate::redo::recover::{self, DiskVersion, RecoveredLog};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use rekindle_testing::crash_disk::{CrashDisk, CrashFile};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// Sectors of the disk: 5 blocks of 4 KiB.
pub const SECTORS: u64 = 40;
/// Bytes of the disk.
pub const BYTES: u64 = SECTORS * 512;
const LIMIT: u64 = 1 << 30;

/// The content of a disk: the number that fills each sector.
pub type Content = Vec<u64>;

/// Returns the content of the image before any write.
pub fn initial_content() -> Content {
    (0..SECTORS).map(|sector| 1_000_000 + sector).collect()
}

pub fn initial_image() -> Vec<u8> {
    bytes_of(&initial_content())
}

/// Fills each sector with its number: 64 times 8 bytes are 512.
fn bytes_of(content: &[u64]) -> Vec<u8> {
    content.iter().flat_map(|value| value.to_le_bytes().repeat(64)).collect()
}

/// Returns the content of a disk, through its log if it has one. Fails on a torn sector.
pub fn content(disk: &CrashDisk, log: Option<&Log<CrashFile>>) -> Content {
    let mut disk_bytes = vec![0xee; BYTES as usize];
    let whole_image = vec![LocatedPiece { start: 0, bytes: BYTES, source: None }];
    for LocatedPiece { start, bytes, source } in log.map_or(whole_image, |log| log.look_up(0, BYTES)) {
        let target = &mut disk_bytes[start as usize..(start + bytes) as usize];
        let (file, offset) = match source {
            None => (disk.image(), start),
            Some(Source::Data { epoch, offset }) => (log.unwrap().segment_file(epoch).unwrap(), offset),
            Some(Source::Zeroes { .. }) => {
                target.fill(0);
                continue;
            }
        };
        let (buffer, skip) = read_unaligned(&file, offset, bytes as usize).unwrap();
        target.copy_from_slice(&buffer[skip..skip + bytes as usize]);
    }
    let sectors = disk_bytes.chunks(512).map(|sector| {
        assert!(sector[..504] == sector[8..], "a torn sector: {sector:?}");
        u64::from_le_bytes(sector[..8].try_into().unwrap())
    });
    sectors.collect()
}

/// The guarantees after a power failure.
#[derive(Debug, Clone, Default)]
pub struct Guarantee {
    /// The allowed values of each sector of the newest disk.
    pub newest: Vec<BTreeSet<u64>>,
    /// Epochs that must be available. No other epoch may be.
    pub sealed: BTreeSet<u64>,
}

#[derive(Debug)]
struct PendingWrite {
    entry: LogEntry,
    /// Header and data of the entry.
    bytes: Buffer,
    /// The value of each written sector.
    values: Vec<u64>,
}

impl PendingWrite {
    fn first_sector(&self) -> u64 {
        self.entry.disk_offset / 512
    }
}

/// The expected value of a sector, and the sequence number of the write that it is of.
#[derive(Debug, Clone, Copy)]
pub struct SectorValue {
    pub sequence: u64,
    pub value: u64,
}

/// Returns the expected values of a disk with this content, before any write.
pub fn unwritten(content: &[u64]) -> Vec<SectorValue> {
    content.iter().map(|value| SectorValue { sequence: 0, value: *value }).collect()
}

/// A disk with its log, its writes in progress and its expected content.
pub struct ProtectedDisk {
    pub disk: CrashDisk,
    pub log_dir: Mutex<Option<LogDirectory<CrashDisk>>>,
    pub log: Option<Log<CrashFile>>,
    pending: Vec<PendingWrite>,
    /// The value of the newest written sector.
    newest_value: u64,
    /// The expected result of reads.
    pub expected: Vec<SectorValue>,
    pub guarantee: Guarantee,
    /// The disk of each marked epoch.
    pub epochs: BTreeMap<u64, Content>,
    pub uuid: Uuid,
    /// Whether all syncs of the image have succeeded.
    pub durability: Arc<Durability>,
    /// The newest disk, while an older epoch is open and nothing was discarded.
    undiscarded: Option<Vec<SectorValue>>,
}

impl ProtectedDisk {
    /// Creates a disk with a new log.
    pub fn begin(disk: CrashDisk) -> Self {
        let log_dir = LogDirectory::create(disk.clone(), BYTES, None).unwrap();
        let uuid = log_dir.state().disk;
        let newest = initial_content().into_iter().map(|value| BTreeSet::from([value])).collect();
        Self {
            disk,
            log_dir: Mutex::new(Some(log_dir)),
            log: Some(Log::new(uuid, 1, 0, 0, LIMIT)),
            pending: Vec::new(),
            newest_value: 0,
            expected: unwritten(&initial_content()),
            guarantee: Guarantee { newest, sealed: BTreeSet::from([0]) },
            epochs: BTreeMap::from([(0, initial_content())]),
            uuid,
            durability: Arc::default(),
            undiscarded: None,
        }
    }

    pub fn log(&mut self) -> &mut Log<CrashFile> {
        self.log.as_mut().unwrap()
    }

    /// Creates the segments that the log needs, which discards the epochs after the open one.
    pub fn prepare(&mut self) -> Result<(), RedoError> {
        for epoch in self.log().missing_segments() {
            let mut log_dir = self.log_dir.lock().unwrap();
            let log_dir = log_dir.as_mut().unwrap();
            let was_rewound = log_dir.is_rewound();
            let created = log_dir.create_segment(epoch);
            if was_rewound && !log_dir.is_rewound() {
                self.undiscarded = None;
                self.guarantee.newest = only_values(&self.expected);
                let newest = self.log.as_ref().unwrap().closed();
                self.guarantee.sealed.retain(|epoch| *epoch <= newest);
            }
            self.log.as_mut().unwrap().add_ready(created?);
        }
        Ok(())
    }

    /// Starts a write of some sectors, or zeroes them.
    pub fn write(&mut self, sector: u64, sectors: u64, kind: EntryKind) {
        let (disk_offset, len) = (sector * 512, sectors.min(SECTORS - sector) * 512);
        let entry = self.log().allocate(disk_offset, len, kind, SpaceLimit::Enforced).unwrap();
        let values: Vec<u64> = (0..len / 512)
            .map(|_| match kind {
                EntryKind::Data => {
                    self.newest_value += 1;
                    self.newest_value
                }
                _ => 0,
            })
            .collect();
        let data = if kind == EntryKind::Data { bytes_of(&values) } else { Vec::new() };
        let mut bytes = Buffer::new(entry.length() as usize);
        bytes[..PAGE_BYTES as usize].copy_from_slice(&self.log().entry_header(&entry, &data));
        bytes[PAGE_BYTES as usize..][..data.len()].copy_from_slice(&data);
        for (sector, value) in (sector..).zip(&values) {
            self.guarantee.newest[sector as usize].insert(*value);
        }
        self.pending.push(PendingWrite { entry, bytes, values });
    }

    /// Completes one of the writes in progress.
    pub fn end_write(&mut self, which: usize) {
        self.try_end_write(which).unwrap();
    }

    /// Completes a write like [`Self::end_write`]. A write that fails stays in progress, as the engine retries it.
    pub fn try_end_write(&mut self, which: usize) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let which = which % self.pending.len();
        let PendingWrite { entry, bytes, .. } = &self.pending[which];
        let file = self.log.as_ref().unwrap().segment_file(entry.epoch).unwrap();
        file.write_at(&bytes[..entry.length() as usize], entry.offset)?;
        let completed = self.pending.swap_remove(which);
        self.log().complete_write(&completed.entry);
        let (sequence, first_sector) = (completed.entry.sequence, completed.first_sector() as usize);
        for (expected, value) in self.expected[first_sector..].iter_mut().zip(completed.values) {
            if expected.sequence < sequence {
                *expected = SectorValue { sequence, value };
            }
        }
        Ok(())
    }

    pub fn end_writes(&mut self) {
        while !self.pending.is_empty() {
            self.end_write(0);
        }
    }

    /// Flushes as the guest.
    pub fn flush(&mut self) {
        for segment in self.log().unsynced(u64::MAX).unwrap() {
            segment.file.sync().unwrap();
            self.log().record_sync(segment.epoch, segment.written, SyncOutcome::Synced);
        }
        for (sector, expected) in self.expected.iter().enumerate() {
            let pending_values = self.pending.iter().filter_map(|pending| {
                let index = sector.checked_sub(pending.first_sector() as usize)?;
                pending.values.get(index).copied()
            });
            self.guarantee.newest[sector] = pending_values.chain([expected.value]).collect();
        }
        // The space of overwritten entries is reclaimed; all reads of it have ended.
        for ReclaimedSpace { file, offset, bytes } in self.log().reclaim() {
            file.zero(offset, bytes, true).unwrap();
        }
    }

    /// Begins a checkpoint, with the guest stopped.
    pub fn mark(&mut self) -> u64 {
        self.end_writes();
        self.prepare().unwrap();
        let epoch = self.log().mark().unwrap();
        let content = self.expected_content();
        // Each epoch has only one content.
        assert_eq!(*self.epochs.entry(epoch).or_insert_with(|| content.clone()), content, "epoch {epoch}");
        epoch
    }

    pub fn seal(&mut self, epoch: u64) -> Result<(), RedoError> {
        let mut epochs_with_record = Vec::new();
        let failed = |e| RedoError::io(Path::new("log"), "making it durable")(e);
        for segment in self.log().segments_to_seal(epoch).unwrap() {
            if segment.make_durable(Path::new("log")).map_err(failed)? == SealRecord::Written {
                epochs_with_record.push(segment.epoch);
            }
            self.log().record_sync(segment.epoch, segment.written, SyncOutcome::Synced);
        }
        self.log_dir.lock().unwrap().as_mut().unwrap().record(|state| state.seal(epoch, &epochs_with_record))?;
        self.log().mark_sealed(&epochs_with_record);
        self.guarantee.sealed.insert(epoch);
        // All earlier writes are durable.
        let sealed_content = &self.epochs[&epoch];
        for (sector, allowed) in self.guarantee.newest.iter_mut().enumerate() {
            let sealed_value = sealed_content[sector];
            if self.expected[sector].value == sealed_value
                && !self.pending.iter().any(|pending| pending.first_sector() <= sector as u64)
            {
                *allowed = BTreeSet::from([sealed_value]);
            }
        }
        Ok(())
    }

    /// Returns the image as the target of merges.
    fn target(&self) -> MergeTarget<CrashFile> {
        MergeTarget::new(Synced::new(self.disk.image(), Arc::clone(&self.durability)))
    }

    /// Commits the checkpoint and merges it.
    pub fn commit(&mut self, epoch: u64) -> Result<(), RedoError> {
        self.guarantee.sealed.retain(|sealed| *sealed >= epoch);
        let Some(batch) = self.log().batch(epoch) else { return Ok(()) };
        merge(&self.log_dir, &batch, &mut self.target(), || Ok(()))?;
        self.log().merged_to(batch.upto);
        while self.log().sweep() {}
        self.log_dir.lock().unwrap().as_ref().unwrap().remove_done()
    }

    /// Merges all epochs and ends the log.
    pub fn end(&mut self) {
        self.end_writes();
        self.log().close();
        let upto = self.log().closed();
        if let Some(batch) = self.log().batch(upto) {
            merge(&self.log_dir, &batch, &mut self.target(), || Ok(())).unwrap();
        }
        let next_epoch = self.log().epoch();
        let mut log_dir = self.log_dir.lock().unwrap().take().unwrap();
        log_dir.close(last_used_epoch(next_epoch)).unwrap();
        log_dir.destroy().unwrap();
        self.log = None;
        self.guarantee.sealed.clear();
        self.guarantee.newest = only_values(&self.expected);
    }

    /// Kills the server, loses the writes in progress, and opens the disk with another server.
    pub fn reopen(&mut self, version: DiskVersion) {
        self.pending.clear();
        self.durability = Arc::default();
        let recovered = recover::open(self.disk.clone(), BYTES, version, LIMIT).unwrap().unwrap();
        let RecoveredLog { log_dir, log } = recovered;
        let is_rewound = log_dir.is_rewound();
        self.log_dir = Mutex::new(Some(log_dir));
        if version == DiskVersion::Newest {
            self.expected = self.undiscarded.take().unwrap_or_else(|| self.expected.clone());
        }
        if let DiskVersion::Epoch { epoch, .. } = version {
            if is_rewound {
                self.undiscarded.get_or_insert_with(|| self.expected.clone());
            }
            self.expected = unwritten(&self.epochs[&epoch]);
        }
        self.log = Some(log);
        // After a complete merge, sequence numbers start again.
        self.expected.iter_mut().for_each(|expected| expected.sequence = 0);
        if version == DiskVersion::Newest {
            // Opening made these writes durable.
            self.guarantee.newest = only_values(&self.expected);
        }
        self.check();
    }

    fn expected_content(&self) -> Content {
        self.expected.iter().map(|expected| expected.value).collect()
    }

    /// Checks that reads return the written content.
    pub fn check(&self) {
        assert_eq!(content(&self.disk, self.log.as_ref()), self.expected_content());
    }
}

/// Returns the allowed values if each sector has its expected value.
fn only_values(expected: &[SectorValue]) -> Vec<BTreeSet<u64>> {
    expected.iter().map(|expected| BTreeSet::from([expected.value])).collect()
}
