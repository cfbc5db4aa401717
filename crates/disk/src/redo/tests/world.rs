//! A guest, its log, and what must be true of its disk: the same steps as the engine and the keeper take, on a disk in memory.

use super::files::{Memory, MemoryFile};
use crate::image::Durability;
use crate::redo::error::RedoError;
use crate::redo::files::{LogFile, Synced, read_any};
use crate::redo::format::{PAGE, What};
use crate::redo::index::Source;
use crate::redo::log::{Log, Placed};
use crate::redo::merge::{Target, merge};
use crate::redo::recover::{self, Wanted};
use crate::redo::state::Home;
use rekindle_kernel::uring::Buffer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// Sectors of the disk.
pub const SECTORS: u64 = 40;
/// Bytes.
pub const BYTES: u64 = SECTORS * 512;
const LIMIT: u64 = 1 << 30;

/// A disk: for each sector the number that all of it is filled with.
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

/// What is on a disk, through its log if it has one. A sector that is torn fails.
pub fn content(disk: &Memory, log: Option<&Log<MemoryFile>>) -> Content {
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

/// What must be true if the power goes now.
#[derive(Debug, Clone, Default)]
pub struct Promise {
    /// What each sector of the newest disk may be.
    pub newest: Vec<BTreeSet<u64>>,
    /// Epochs that must be to be had. Others must not.
    pub sealed: BTreeSet<u64>,
}

#[derive(Debug)]
struct UnderWay {
    placed: Placed,
    entry: Buffer,
    values: Vec<u64>,
}

/// See [the module](self).
pub struct World {
    pub disk: Memory,
    pub home: Mutex<Option<Home<Memory>>>,
    pub log: Option<Log<MemoryFile>>,
    under_way: Vec<UnderWay>,
    version: u64,
    /// What the guest reads: the sequence of the newest write, and its number.
    pub now: Vec<(u64, u64)>,
    pub promise: Promise,
    /// The disk of each epoch that was ever marked.
    pub epochs: BTreeMap<u64, Content>,
    pub uuid: Uuid,
    /// Whether all syncs of the image have succeeded.
    pub durability: Arc<Durability>,
    committed: u64,
    /// The newest disk, while it is gone back from and nothing was given up.
    left: Option<Vec<(u64, u64)>>,
}

impl World {
    /// A disk whose log begins now.
    pub fn begin(disk: Memory) -> Self {
        let home = Home::create(disk.clone(), BYTES, None).unwrap();
        let uuid = home.state().disk;
        let now: Vec<_> = initial().into_iter().map(|value| (0, value)).collect();
        let newest = initial().into_iter().map(|value| BTreeSet::from([value])).collect();
        Self {
            disk,
            home: Mutex::new(Some(home)),
            log: Some(Log::new(uuid, 1, 0, 0, LIMIT)),
            under_way: Vec::new(),
            version: 0,
            now,
            promise: Promise { newest, sealed: BTreeSet::from([0]) },
            epochs: BTreeMap::from([(0, initial())]),
            uuid,
            durability: Arc::default(),
            committed: 0,
            left: None,
        }
    }

    pub fn log(&mut self) -> &mut Log<MemoryFile> {
        self.log.as_mut().unwrap()
    }

    /// Make the segments that will be needed. What was left behind is given up by that.
    pub fn prepare(&mut self) -> Result<(), RedoError> {
        for epoch in self.log().wanted() {
            let mut home = self.home.lock().unwrap();
            let home = home.as_mut().unwrap();
            let was_rewound = home.is_rewound();
            let made = home.prepare(epoch);
            if was_rewound && !home.is_rewound() {
                self.left = None;
                let now = self.now.iter().map(|(_, value)| BTreeSet::from([*value]));
                self.promise.newest = now.collect();
                let newest = self.log.as_ref().unwrap().closed();
                self.promise.sealed.retain(|epoch| *epoch <= newest);
            }
            self.log.as_mut().unwrap().provide(made?);
        }
        Ok(())
    }

    /// The guest writes, or makes zeroes of, some sectors. It is under way then.
    pub fn write(&mut self, sector: u64, sectors: u64, what: What) {
        let (at, bytes_of) = (sector * 512, sectors.min(SECTORS - sector) * 512);
        let placed = self.log().place(at, bytes_of, what, true).unwrap();
        let values: Vec<u64> = (0..bytes_of / 512)
            .map(|_| match what {
                What::Data => {
                    self.version += 1;
                    self.version
                }
                _ => 0,
            })
            .collect();
        let data = if what == What::Data { bytes(&values) } else { Vec::new() };
        let mut entry = Buffer::new(placed.length() as usize);
        entry[..PAGE as usize].copy_from_slice(&self.log().header(&placed, &data));
        entry[PAGE as usize..][..data.len()].copy_from_slice(&data);
        for (sector, value) in (sector..).zip(&values) {
            self.promise.newest[sector as usize].insert(*value);
        }
        self.under_way.push(UnderWay { placed, entry, values });
    }

    /// One of the writes that are under way ends.
    pub fn end_write(&mut self, which: usize) {
        if self.under_way.is_empty() {
            return;
        }
        let UnderWay { placed, entry, values } = self.under_way.swap_remove(which % self.under_way.len());
        self.log().file(placed.epoch).unwrap().write_at(&entry[..placed.length() as usize], placed.offset).unwrap();
        self.log().written(&placed);
        for (place, value) in self.now[(placed.at / 512) as usize..].iter_mut().zip(values) {
            if place.0 < placed.sequence {
                *place = (placed.sequence, value);
            }
        }
    }

    pub fn end_writes(&mut self) {
        while !self.under_way.is_empty() {
            self.end_write(0);
        }
    }

    /// The guest flushes.
    pub fn flush(&mut self) {
        for segment in self.log().unsynced(u64::MAX).unwrap() {
            segment.file.sync().unwrap();
            self.log().synced(segment.epoch, segment.written, true);
        }
        for (sector, (_, value)) in self.now.iter().enumerate() {
            let over = |under_way: &&UnderWay| {
                let first = under_way.placed.at / 512;
                (first..first + under_way.placed.bytes / 512).contains(&(sector as u64))
            };
            let may = self
                .under_way
                .iter()
                .filter(over)
                .map(|under_way| under_way.values[sector - (under_way.placed.at / 512) as usize]);
            self.promise.newest[sector] = may.chain([*value]).collect();
        }
        // Room of what was overwritten is given back, whatever reads it has ended.
        for (file, at, bytes) in self.log().reclaim() {
            file.zero(at, bytes, true).unwrap();
        }
    }

    /// The guest is stopped and a checkpoint begins.
    pub fn mark(&mut self) -> u64 {
        self.end_writes();
        self.prepare().unwrap();
        let epoch = self.log().mark().unwrap();
        let now: Content = self.now.iter().map(|(_, value)| *value).collect();
        // An epoch is one content.
        assert_eq!(*self.epochs.entry(epoch).or_insert_with(|| now.clone()), now, "epoch {epoch}");
        epoch
    }

    pub fn seal(&mut self, epoch: u64) -> Result<(), RedoError> {
        let mut sealed = Vec::new();
        let failed = |e| RedoError::io(Path::new("log"), "writing a seal record")(e);
        for segment in self.log().unsealed(epoch).unwrap() {
            segment.write().map_err(failed)?;
            segment.sync().map_err(failed)?;
            self.log().synced(segment.epoch, segment.written, true);
            sealed.push(segment.epoch);
        }
        self.home.lock().unwrap().as_mut().unwrap().record(|state| state.seal(epoch, &sealed))?;
        self.log().sealed(&sealed);
        self.promise.sealed.insert(epoch);
        // All that was written until then is durable.
        let sealed = &self.epochs[&epoch];
        for (sector, may) in self.promise.newest.iter_mut().enumerate() {
            if self.now[sector].1 == sealed[sector]
                && !self.under_way.iter().any(|way| way.placed.at / 512 <= sector as u64)
            {
                *may = BTreeSet::from([sealed[sector]]);
            }
        }
        Ok(())
    }

    /// The image, as merges write it.
    fn target(&self) -> Target<MemoryFile> {
        Target::new(Synced::new(self.disk.image(), Arc::clone(&self.durability)))
    }

    /// The checkpoint counts, and is merged.
    pub fn commit(&mut self, epoch: u64) -> Result<(), RedoError> {
        self.committed = self.committed.max(epoch);
        self.promise.sealed.retain(|sealed| *sealed >= epoch);
        let Some(batch) = self.log().batch(epoch) else { return Ok(()) };
        merge(&self.home, &batch, &mut self.target(), || Ok(()))?;
        self.log().merged_to(batch.upto);
        while self.log().sweep() {}
        self.home.lock().unwrap().as_ref().unwrap().remove_done()
    }

    /// All is merged, and the log goes.
    pub fn end(&mut self) {
        self.end_writes();
        self.log().close();
        let upto = self.log().closed();
        if let Some(batch) = self.log().batch(upto) {
            merge(&self.home, &batch, &mut self.target(), || Ok(())).unwrap();
        }
        let next = self.log().epoch();
        let mut home = self.home.lock().unwrap().take().unwrap();
        home.close(next).unwrap();
        home.destroy().unwrap();
        self.log = None;
        self.promise.sealed.clear();
        self.promise.newest = self.now.iter().map(|(_, value)| BTreeSet::from([*value])).collect();
    }

    /// The server is killed, what was under way is lost, and another one opens the disk.
    pub fn reopen(&mut self, wanted: Wanted) {
        self.under_way.clear();
        self.durability = Arc::default();
        let (home, log) = recover::open(self.disk.clone(), BYTES, wanted, LIMIT).unwrap().unwrap();
        let is_rewound = home.is_rewound();
        self.home = Mutex::new(Some(home));
        if wanted == Wanted::Newest {
            self.now = self.left.take().unwrap_or_else(|| self.now.clone());
        }
        if let Wanted::Epoch { epoch, .. } = wanted {
            if is_rewound {
                self.left.get_or_insert_with(|| self.now.clone());
            }
            self.now = self.epochs[&epoch].iter().map(|value| (0, *value)).collect();
        }
        self.log = Some(log);
        // Sequences are of entries that there are; where all were merged they begin again.
        self.now.iter_mut().for_each(|(sequence, _)| *sequence = 0);
        if wanted == Wanted::Newest {
            // Found, and made durable.
            self.promise.newest = self.now.iter().map(|(_, value)| BTreeSet::from([*value])).collect();
        }
        self.check();
    }

    /// What is read is what was written.
    pub fn check(&self) {
        let now: Content = self.now.iter().map(|(_, value)| *value).collect();
        assert_eq!(content(&self.disk, self.log.as_ref()), now);
    }
}
