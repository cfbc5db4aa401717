//! A guest, its log, and the guarantees for its disk. The steps are those of the engine and the keeper, on a disk in
//! memory.

use super::files::{CrashDisk, CrashFile};
use crate::image::Durability;
use crate::redo::error::RedoError;
use crate::redo::files::{LogFile, Synced, read_any};
use crate::redo::format::{EntryKind, PAGE};
use crate::redo::index::Source;
use crate::redo::log::seal::SealRecord;
use crate::redo::log::{Log, LogEntry, SpaceLimit, SyncOutcome};
use crate::redo::merge::{MergeTarget, merge};
use crate::redo::recover::{self, DiskVersion};
use crate::redo::state::LogDirectory;
use rekindle_kernel::uring::Buffer;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

pub const SECTORS: u64 = 40;
/// Bytes of the disk.
pub const BYTES: u64 = SECTORS * 512;
const LIMIT: u64 = 1 << 30;

/// The content of a disk: the number that fills each sector.
pub type Content = Vec<u64>;

pub fn initial() -> Content {
    (0..SECTORS).map(|sector| 1_000_000 + sector).collect()
}

pub fn image() -> Vec<u8> {
    bytes(&initial())
}

fn bytes(content: &[u64]) -> Vec<u8> {
    content.iter().flat_map(|value| value.to_le_bytes().repeat(64)).collect()
}

/// Returns the content of a disk, through its log if it has one. Fails on a torn sector.
pub fn content(disk: &CrashDisk, log: Option<&Log<CrashFile>>) -> Content {
    let mut all = vec![0xee; BYTES as usize];
    let pieces = log.map_or(vec![(0, BYTES, None)], |log| log.look_up(0, BYTES));
    for (at, len, source) in pieces {
        let into = &mut all[at as usize..(at + len) as usize];
        let (file, from) = match source {
            None => (disk.image(), at),
            Some(Source::Data { epoch, at }) => (log.unwrap().file(epoch).unwrap(), at),
            Some(Source::Zeroes { .. }) => {
                into.fill(0);
                continue;
            }
        };
        let (read, skip) = read_any(&file, from, len as usize).unwrap();
        into.copy_from_slice(&read[skip..skip + len as usize]);
    }
    let sectors = all.chunks(512).map(|sector| {
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
    placed: LogEntry,
    entry: Buffer,
    values: Vec<u64>,
}

/// A disk with its log, its writes in progress and its expected content.
pub struct ProtectedDisk {
    pub disk: CrashDisk,
    pub log_dir: Mutex<Option<LogDirectory<CrashDisk>>>,
    pub log: Option<Log<CrashFile>>,
    pending: Vec<PendingWrite>,
    version: u64,
    /// The expected result of reads: sequence number of the newest write, and its number.
    pub now: Vec<(u64, u64)>,
    pub guarantee: Guarantee,
    /// The disk of each marked epoch.
    pub epochs: BTreeMap<u64, Content>,
    pub uuid: Uuid,
    /// Whether all syncs of the image have succeeded.
    pub durability: Arc<Durability>,
    committed: u64,
    /// The newest disk, while an older epoch is open and nothing was discarded.
    left: Option<Vec<(u64, u64)>>,
}

impl ProtectedDisk {
    /// Creates a disk with a new log.
    pub fn begin(disk: CrashDisk) -> Self {
        let log_dir = LogDirectory::create(disk.clone(), BYTES, None).unwrap();
        let uuid = log_dir.state().disk;
        let now: Vec<_> = initial().into_iter().map(|value| (0, value)).collect();
        let newest = initial().into_iter().map(|value| BTreeSet::from([value])).collect();
        Self {
            disk,
            log_dir: Mutex::new(Some(log_dir)),
            log: Some(Log::new(uuid, 1, 0, 0, LIMIT)),
            pending: Vec::new(),
            version: 0,
            now,
            guarantee: Guarantee { newest, sealed: BTreeSet::from([0]) },
            epochs: BTreeMap::from([(0, initial())]),
            uuid,
            durability: Arc::default(),
            committed: 0,
            left: None,
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
            let made = log_dir.prepare(epoch);
            if was_rewound && !log_dir.is_rewound() {
                self.left = None;
                let now = self.now.iter().map(|(_, value)| BTreeSet::from([*value]));
                self.guarantee.newest = now.collect();
                let newest = self.log.as_ref().unwrap().closed();
                self.guarantee.sealed.retain(|epoch| *epoch <= newest);
            }
            self.log.as_mut().unwrap().add_ready(made?);
        }
        Ok(())
    }

    /// Starts a write of some sectors, or zeroes them.
    pub fn write(&mut self, sector: u64, sectors: u64, what: EntryKind) {
        let (at, bytes_of) = (sector * 512, sectors.min(SECTORS - sector) * 512);
        let placed = self.log().allocate(at, bytes_of, what, SpaceLimit::Enforced).unwrap();
        let values: Vec<u64> = (0..bytes_of / 512)
            .map(|_| match what {
                EntryKind::Data => {
                    self.version += 1;
                    self.version
                }
                _ => 0,
            })
            .collect();
        let data = if what == EntryKind::Data { bytes(&values) } else { Vec::new() };
        let mut entry = Buffer::new(placed.length() as usize);
        entry[..PAGE as usize].copy_from_slice(&self.log().header(&placed, &data));
        entry[PAGE as usize..][..data.len()].copy_from_slice(&data);
        for (sector, value) in (sector..).zip(&values) {
            self.guarantee.newest[sector as usize].insert(*value);
        }
        self.pending.push(PendingWrite { placed, entry, values });
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
        let PendingWrite { placed, entry, .. } = &self.pending[which];
        let file = self.log.as_ref().unwrap().file(placed.epoch).unwrap();
        file.write_at(&entry[..placed.length() as usize], placed.offset)?;
        let PendingWrite { placed, values, .. } = self.pending.swap_remove(which);
        self.log().written(&placed);
        for (place, value) in self.now[(placed.at / 512) as usize..].iter_mut().zip(values) {
            if place.0 < placed.sequence {
                *place = (placed.sequence, value);
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
        for (sector, (_, value)) in self.now.iter().enumerate() {
            let over = |pending: &&PendingWrite| {
                let first = pending.placed.at / 512;
                (first..first + pending.placed.bytes / 512).contains(&(sector as u64))
            };
            let may = self
                .pending
                .iter()
                .filter(over)
                .map(|pending| pending.values[sector - (pending.placed.at / 512) as usize]);
            self.guarantee.newest[sector] = may.chain([*value]).collect();
        }
        // The space of overwritten entries is reclaimed; all reads of it have ended.
        for (file, at, bytes) in self.log().reclaim() {
            file.zero(at, bytes, true).unwrap();
        }
    }

    /// Begins a checkpoint, with the guest stopped.
    pub fn mark(&mut self) -> u64 {
        self.end_writes();
        self.prepare().unwrap();
        let epoch = self.log().mark().unwrap();
        let now: Content = self.now.iter().map(|(_, value)| *value).collect();
        // Each epoch has only one content.
        assert_eq!(*self.epochs.entry(epoch).or_insert_with(|| now.clone()), now, "epoch {epoch}");
        epoch
    }

    pub fn seal(&mut self, epoch: u64) -> Result<(), RedoError> {
        let mut sealed = Vec::new();
        let failed = |e| RedoError::io(Path::new("log"), "making it durable")(e);
        for segment in self.log().segments_to_seal(epoch).unwrap() {
            if segment.make_durable(Path::new("log")).map_err(failed)? == SealRecord::Written {
                sealed.push(segment.epoch);
            }
            self.log().record_sync(segment.epoch, segment.written, SyncOutcome::Synced);
        }
        self.log_dir.lock().unwrap().as_mut().unwrap().record(|state| state.seal(epoch, &sealed))?;
        self.log().mark_sealed(&sealed);
        self.guarantee.sealed.insert(epoch);
        // All earlier writes are durable.
        let sealed = &self.epochs[&epoch];
        for (sector, may) in self.guarantee.newest.iter_mut().enumerate() {
            if self.now[sector].1 == sealed[sector]
                && !self.pending.iter().any(|way| way.placed.at / 512 <= sector as u64)
            {
                *may = BTreeSet::from([sealed[sector]]);
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
        self.committed = self.committed.max(epoch);
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
        let next = self.log().epoch();
        let mut log_dir = self.log_dir.lock().unwrap().take().unwrap();
        log_dir.close(next).unwrap();
        log_dir.destroy().unwrap();
        self.log = None;
        self.guarantee.sealed.clear();
        self.guarantee.newest = self.now.iter().map(|(_, value)| BTreeSet::from([*value])).collect();
    }

    /// Kills the server, loses the writes in progress, and opens the disk with another server.
    pub fn reopen(&mut self, wanted: DiskVersion) {
        self.pending.clear();
        self.durability = Arc::default();
        let (log_dir, log) = recover::open(self.disk.clone(), BYTES, wanted, LIMIT).unwrap().unwrap();
        let is_rewound = log_dir.is_rewound();
        self.log_dir = Mutex::new(Some(log_dir));
        if wanted == DiskVersion::Newest {
            self.now = self.left.take().unwrap_or_else(|| self.now.clone());
        }
        if let DiskVersion::Epoch { epoch, .. } = wanted {
            if is_rewound {
                self.left.get_or_insert_with(|| self.now.clone());
            }
            self.now = self.epochs[&epoch].iter().map(|value| (0, *value)).collect();
        }
        self.log = Some(log);
        // After a complete merge, sequence numbers start again.
        self.now.iter_mut().for_each(|(sequence, _)| *sequence = 0);
        if wanted == DiskVersion::Newest {
            // Opening made these writes durable.
            self.guarantee.newest = self.now.iter().map(|(_, value)| BTreeSet::from([*value])).collect();
        }
        self.check();
    }

    /// Checks that reads return the written content.
    pub fn check(&self) {
        let now: Content = self.now.iter().map(|(_, value)| *value).collect();
        assert_eq!(content(&self.disk, self.log.as_ref()), now);
    }
}
