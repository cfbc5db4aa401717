//! Kills and power losses at every step of many histories of a disk with overlays, on a disk in memory. The directory,
//! its state and the plan are the real ones. QEMU is a model that keeps only the promises that `qemu::block` states:
//! a mark flushes the overlay below it; a merge may have copied any part, and flushes nothing. A checkpoint either puts an
//! overlay on the disk, or copies the one that is there: its head.
//!
//! After each crash: the newest disk has every flushed write, each epoch that the state offers has the disk of its
//! mark, and the committed checkpoint is among them. Deliberate mistakes (`Mistake`) show that this check can fail.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::directory::{OverlayDirectory, OverlayHead, overlay_file_name};
use super::plan::{FoundOverlays, OverlayStep};
use super::state::OverlayState;
use rekindle_kernel::durable_file::DurableFile;
use rekindle_testing::crash_disk::{CrashDisk, CrashFile, PowerFailure, Step, power_failures};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const SECTOR_BYTES: usize = 512;
const SECTORS: usize = 4;
const HISTORIES: u64 = 40;
/// Further histories, in which users of libvirt merge.
const HISTORIES_WITH_USERS: u64 = 20;
const ACTIONS: usize = 60;

/// The number that fills each sector. In an overlay, 0 stands for a sector without a write.
type Content = Vec<u64>;

/// An omission that the check must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// A checkpoint is committed before its epoch is sealed.
    CommitWithoutSeal,
    /// A seal syncs no overlay.
    SealWithoutSync,
    /// `merged` is recorded before the image is synced.
    RecordWithoutSync,
    /// The floor is recorded after the merge has started.
    LateFloor,
    /// A mark puts an overlay on the disk whose name is not durable.
    VolatileOverlay,
    /// QEMU does not flush the overlay below a mark.
    MarkWithoutFlush,
    /// A checkpoint counts as committed although it may not be.
    MergeOfUncommitted,
    /// The guest resumes on its image while the overlays still count.
    EarlyResume,
    /// A seal does not sync the head.
    HeadWithoutSync,
    /// A checkpoint copies the overlay over the head of the committed one.
    HeadInPlace,
    /// The head of the committed checkpoint is removed before a later checkpoint is committed.
    EarlyRemovalOfHead,
    /// A merge by a user of libvirt into the image is not noticed.
    UnnoticedMerge,
    /// A user of libvirt can merge before that is recorded.
    LateExposure,
    /// After a merge by a user, a checkpoint copies the overlay that is there.
    KeptAfterMerge,
}

/// The disk of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct DiskMark {
    epoch: u64,
    head: Option<OverlayHead>,
}

/// A disk and its protector.
#[derive(Debug, Clone, Copy)]
struct Setting {
    mistake: Option<Mistake>,
    /// QEMU flushes nothing, as with `cache=unsafe`. Then only checkpoints survive a power failure.
    ignores_flushes: bool,
}

/// What must hold after a power failure.
#[derive(Debug, Clone)]
struct Guarantee {
    /// The allowed values of each sector of the newest disk.
    newest: Vec<BTreeSet<u64>>,
    committed: Option<DiskMark>,
    /// The disk of a checkpoint that may be committed.
    sealed: Option<DiskMark>,
}

struct GuaranteeAt {
    steps: usize,
    guarantee: Guarantee,
}

fn initial_content() -> Content {
    (1..=SECTORS as u64).map(|sector| sector * 1000).collect()
}

fn bytes_of(content: &[u64]) -> Vec<u8> {
    content.iter().flat_map(|value| value.to_le_bytes().repeat(SECTOR_BYTES / 8)).collect()
}

fn read_sectors(file: &CrashFile) -> Content {
    let mut bytes = vec![0; SECTORS * SECTOR_BYTES];
    file.read_at(&mut bytes, 0).unwrap();
    let value = |sector: &[u8]| u64::from_le_bytes(*sector.first_chunk().unwrap());
    bytes.chunks(SECTOR_BYTES).map(value).collect()
}

/// Returns the disk that image and overlays make, the overlays oldest first.
fn stacked_content(disk: &CrashDisk, overlays: impl Iterator<Item = u64>) -> Content {
    let path = |epoch: u64| PathBuf::from(overlay_file_name(epoch));
    overlays.map(path).fold(read_sectors(&disk.image()), |below, overlay| with_overlay(below, disk, &overlay))
}

fn with_overlay(mut content: Content, disk: &CrashDisk, overlay: &Path) -> Content {
    let written = read_sectors(&disk.open(overlay.file_name().unwrap().to_str().unwrap()).unwrap());
    content.iter_mut().zip(written).filter(|(_, value)| *value != 0).for_each(|(below, value)| *below = value);
    content
}

/// A guest, its QEMU, and the protector.
struct ProtectedDisk {
    setting: Setting,
    disk: CrashDisk,
    directory: OverlayDirectory<CrashDisk>,
    /// Epochs of the overlays on the disk.
    chain: Vec<u64>,
    prepared: Option<u64>,
    merging: Option<u64>,
    marked: Option<DiskMark>,
    sealed: Option<DiskMark>,
    committed: u64,
    committed_head: Option<OverlayHead>,
    newest_value: u64,
    expected: Content,
    guarantee: Guarantee,
    marks: BTreeMap<DiskMark, Content>,
    guarantees: Vec<GuaranteeAt>,
}

impl ProtectedDisk {
    fn begin(setting: Setting) -> Self {
        let disk = CrashDisk::new(bytes_of(&initial_content()));
        let newest: Vec<_> = initial_content().into_iter().map(|value| BTreeSet::from([value])).collect();
        let guarantee = Guarantee { newest, committed: None, sealed: None };
        let guarantees = vec![GuaranteeAt { steps: 0, guarantee: guarantee.clone() }];
        let bytes = (SECTORS * SECTOR_BYTES) as u64;
        let directory = OverlayDirectory::create(disk.clone(), OverlayState::new("image".into(), bytes)).unwrap();
        Self {
            setting,
            disk,
            directory,
            chain: Vec::new(),
            prepared: None,
            merging: None,
            marked: None,
            sealed: None,
            committed: 0,
            committed_head: None,
            newest_value: 1_000_000,
            expected: initial_content(),
            guarantee,
            marks: BTreeMap::new(),
            guarantees,
        }
    }

    fn makes(&self, mistake: Mistake) -> bool {
        self.setting.mistake == Some(mistake)
    }

    fn active_file(&self) -> CrashFile {
        self.chain.last().map_or_else(|| self.disk.image(), |epoch| self.disk.open(&overlay_file_name(*epoch)).unwrap())
    }

    fn write(&mut self, sector: usize) {
        self.newest_value += 1;
        self.active_file().write_at(&bytes_of(&[self.newest_value]), (sector * SECTOR_BYTES) as u64).unwrap();
        self.expected[sector] = self.newest_value;
        self.guarantee.newest[sector].insert(self.newest_value);
    }

    fn flush(&mut self) {
        if !self.setting.ignores_flushes {
            self.active_file().sync().unwrap();
            self.guarantee.newest = self.expected.iter().map(|value| BTreeSet::from([*value])).collect();
        }
    }

    fn found(&self) -> FoundOverlays {
        let files = self.directory.epochs().unwrap();
        FoundOverlays { chain: self.chain.clone(), prepared: self.prepared, merging: self.merging, files }
    }

    /// Cancels a merge, and puts the prepared overlay on the disk if the plan allows it.
    fn mark(&mut self) {
        self.merging = None;
        let Ok(epoch) = self.found().check_mark(self.directory.state()) else { return };
        if !self.setting.ignores_flushes && !self.makes(Mistake::MarkWithoutFlush) {
            self.active_file().sync().unwrap();
        }
        self.chain.push(epoch);
        self.prepared = None;
        let mark = DiskMark { epoch: epoch - 1, head: None };
        self.marks.insert(mark, self.expected.clone());
        self.marked = Some(mark);
    }

    /// Copies the overlay that is on the disk: the head of the next checkpoint.
    fn copy_head(&mut self) {
        let (Some(top), None) = (self.chain.last().copied(), self.merging) else { return };
        if top - 1 < self.directory.state().floor && !self.makes(Mistake::KeptAfterMerge) {
            return;
        }
        let removed_up_to = match self.committed_head {
            Some(head) if self.makes(Mistake::EarlyRemovalOfHead) => Some(OverlayHead { number: u64::MAX, ..head }),
            head => head,
        };
        self.directory.remove_useless_heads(removed_up_to).unwrap();
        let own = self.directory.create_head(top - 1).unwrap();
        let in_place = self.committed_head.filter(|head| head.epoch == own.epoch && self.makes(Mistake::HeadInPlace));
        let path = self.directory.head_path(in_place.unwrap_or(own));
        let copied = bytes_of(&read_sectors(&self.active_file()));
        self.disk.open(path.file_name().unwrap().to_str().unwrap()).unwrap().write_at(&copied, 0).unwrap();
        let mark = DiskMark { epoch: own.epoch, head: Some(own) };
        self.marks.insert(mark, self.expected.clone());
        self.marked = Some(mark);
    }

    fn seal(&mut self) {
        let Some(mark) = self.marked.take() else { return };
        let DiskMark { epoch, head } = mark;
        let synced_head = head.filter(|_| !self.makes(Mistake::HeadWithoutSync));
        if self.makes(Mistake::CommitWithoutSeal) {
            self.sealed = Some(mark);
            return;
        }
        let image = self.disk.image();
        if self.makes(Mistake::SealWithoutSync) {
            self.directory.record(|state| state.sealed = state.sealed.max(epoch)).unwrap();
        } else {
            self.directory.seal(epoch, synced_head, || image.sync()).unwrap();
        }
        (self.sealed, self.guarantee.sealed) = (Some(mark), Some(mark));
    }

    fn commit(&mut self) {
        if let Some(mark) = self.sealed.take() {
            self.committed = mark.epoch;
            self.committed_head = self.committed_head.max(mark.head);
            self.guarantee.committed = Some(mark);
        }
    }

    /// Copies the writes of epochs up to `up_to` to the image: all, or those of one sector.
    fn copy(&self, up_to: u64, only_sector: Option<usize>) {
        let merged = stacked_content(&self.disk, self.chain.iter().copied().filter(|epoch| *epoch <= up_to));
        let image = read_sectors(&self.disk.image());
        for sector in only_sector.map_or(0..SECTORS, |sector| sector..sector + 1) {
            if merged[sector] != image[sector] {
                let offset = (sector * SECTOR_BYTES) as u64;
                self.disk.image().write_at(&bytes_of(&[merged[sector]]), offset).unwrap();
            }
        }
    }

    /// A user of libvirt merges one sector of all overlays while the image has no fence, and cancels that.
    fn merge_by_user(&mut self, sector: usize) {
        let (Some(top), None) = (self.chain.last().copied(), self.merging) else { return };
        (self.marked, self.sealed) = (None, None);
        (self.guarantee.committed, self.guarantee.sealed) = (None, None);
        self.record_guarantee();
        if self.makes(Mistake::LateExposure) {
            self.copy(top, Some(sector));
        }
        self.directory.note_exposed().unwrap();
        self.copy(top, Some(sector));
        if !self.makes(Mistake::UnnoticedMerge) {
            self.directory.record(|state| state.note_changed_by_others(top)).unwrap();
        }
        self.directory.note_not_exposed().unwrap();
    }

    /// Takes the next step of the plan.
    fn step(&mut self) {
        let state = self.directory.state().clone();
        let is_early = self.makes(Mistake::MergeOfUncommitted);
        let committed = if is_early { state.sealed } else { self.committed };
        match self.found().next_step(&state, committed) {
            OverlayStep::AwaitMerge { up_to } => {
                self.copy(up_to, None);
                self.chain.retain(|epoch| *epoch > up_to);
                self.merging = None;
            }
            OverlayStep::RecordMerged { up_to } => {
                if !self.makes(Mistake::RecordWithoutSync) {
                    self.disk.image().sync().unwrap();
                }
                self.directory.record(|state| state.note_merged(up_to)).unwrap();
            }
            OverlayStep::Delete { epoch } => self.directory.remove_overlay(epoch).unwrap(),
            OverlayStep::RaiseFloor { to } => {
                if self.makes(Mistake::LateFloor) {
                    self.copy(to, Some(0));
                }
                self.directory.record(|state| state.floor = state.floor.max(to)).unwrap();
                self.directory.remove_useless_heads(self.committed_head).unwrap();
            }
            OverlayStep::Merge { up_to } => self.merging = Some(up_to),
            OverlayStep::Create { epoch } => {
                self.directory.create_overlay(epoch).unwrap();
                if !self.makes(Mistake::VolatileOverlay) {
                    self.directory.make_durable(epoch).unwrap();
                }
                self.prepared = Some(epoch);
            }
            OverlayStep::Resolve => panic!("the device is on its image"),
            OverlayStep::Done => {}
        }
    }

    /// Kills the protector and starts another one; QEMU continues.
    fn restart(&mut self) {
        self.directory = OverlayDirectory::open(self.disk.clone()).unwrap().unwrap();
        (self.marked, self.sealed) = (None, None);
    }

    fn record_guarantee(&mut self) {
        self.guarantees.push(GuaranteeAt { steps: self.disk.steps(), guarantee: self.guarantee.clone() });
    }

    /// Ends the overlays: all are merged while the guest is stopped. Then the guest writes to its image.
    fn end(mut self) -> History {
        (self.guarantee.committed, self.guarantee.sealed) = (None, None);
        self.record_guarantee();
        self.directory.close().unwrap();
        self.merging = None;
        self.flush();
        self.record_guarantee();
        self.copy(u64::MAX, None);
        self.disk.image().sync().unwrap();
        self.chain.clear();
        if self.makes(Mistake::EarlyResume) {
            self.write(0);
            self.flush();
            self.record_guarantee();
        }
        self.directory.destroy().unwrap();
        let mut guarantees = self.guarantees;
        guarantees.push(GuaranteeAt { steps: self.disk.steps(), guarantee: self.guarantee });
        History { setting: self.setting, steps: self.disk.recorded_steps(), guarantees, marks: self.marks }
    }
}

/// The steps of a history, and what must hold after each.
struct History {
    setting: Setting,
    steps: Vec<Step>,
    guarantees: Vec<GuaranteeAt>,
    marks: BTreeMap<DiskMark, Content>,
}

fn make_history(setting: Setting, seed: u64) -> History {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = ProtectedDisk::begin(setting);
    model.record_guarantee();
    for _ in 0..ACTIONS {
        match random.u8(..if seed < HISTORIES { 20 } else { 21 }) {
            0..4 => model.write(random.usize(..SECTORS)),
            4..6 => model.flush(),
            6 => model.mark(),
            7 => model.copy_head(),
            8..10 => model.seal(),
            10..12 => model.commit(),
            12 => model.restart(),
            13 => {
                if let Some(up_to) = model.merging {
                    model.copy(up_to, Some(random.usize(..SECTORS)));
                }
            }
            20 => model.merge_by_user(random.usize(..SECTORS)),
            _ => model.step(),
        }
        model.record_guarantee();
        assert_eq!(stacked_content(&model.disk, model.chain.iter().copied()), model.expected, "seed {seed}");
    }
    model.end()
}

impl History {
    /// Returns the guarantees of which each may hold after `count` steps: those of the actions that ended there, and of
    /// the action in progress.
    fn guarantees_around(&self, count: usize) -> &[GuaranteeAt] {
        let newest = self.guarantees.iter().rposition(|at| at.steps <= count).unwrap();
        let first = self.guarantees.iter().position(|at| at.steps == self.guarantees[newest].steps).unwrap();
        &self.guarantees[first..=(newest + 1).min(self.guarantees.len() - 1)]
    }

    /// Returns what is wrong after a crash that follows `count` steps.
    fn violation(&self, count: usize, failure: &PowerFailure) -> Option<String> {
        let around = self.guarantees_around(count);
        let disk = CrashDisk::after_crash(&bytes_of(&initial_content()), &self.steps, count, &failure.fates);
        let directory = match OverlayDirectory::open(disk.clone()) {
            Ok(directory) => directory,
            Err(e) => return Some(e.to_string()),
        };
        let state = directory.as_ref().map(|directory| directory.state().clone());
        let files = directory.as_ref().map_or_else(Vec::new, |directory| directory.epochs().unwrap());
        let merged = state.as_ref().map_or(0, |state| state.merged);
        let overlays = || files.iter().copied().filter(|epoch| *epoch > merged);
        let newest = stacked_content(&disk, overlays());
        for (sector, value) in newest.iter().enumerate().filter(|_| !self.setting.ignores_flushes) {
            if !around.iter().any(|at| at.guarantee.newest[sector].contains(value)) {
                return Some(format!("sector {sector} of the newest disk is {value}"));
            }
        }
        let offers = |mark: &DiskMark| {
            let has_head = |head| directory.as_ref().is_some_and(|directory| directory.has_head(head).unwrap());
            let is_exposed = directory.as_ref().is_some_and(|directory| directory.is_exposed().unwrap());
            !is_exposed
                && state.as_ref().is_some_and(|state| state.has_epoch(mark.epoch))
                && mark.head.is_none_or(has_head)
        };
        // Of heads, only those that a checkpoint may need have a content.
        let is_needed = |mark: &DiskMark| {
            let is_of = |at: &GuaranteeAt| [at.guarantee.committed, at.guarantee.sealed].contains(&Some(*mark));
            mark.head.is_none() || around.iter().filter(|at| at.steps <= count).any(is_of)
        };
        for (mark, expected) in self.marks.iter().filter(|(mark, _)| is_needed(mark) && offers(mark)) {
            let below = stacked_content(&disk, overlays().take_while(|overlay| *overlay <= mark.epoch));
            let head = mark.head.and_then(|head| directory.as_ref().map(|directory| directory.head_path(head)));
            let content = head.map_or(below.clone(), |path| with_overlay(below, &disk, &path));
            if content != *expected {
                return Some(format!("{mark:?} is {content:?} and was {expected:?}"));
            }
        }
        let is_lost = |at: &GuaranteeAt| at.guarantee.committed.is_some_and(|mark| !offers(&mark));
        around.iter().all(is_lost).then(|| "the committed checkpoint has no disk".to_owned())
    }

    /// Returns the first violation of a kill or a power failure at any step.
    fn first_violation(&self) -> Option<String> {
        (0..=self.steps.len()).find_map(|count| {
            let killed = PowerFailure { fates: BTreeMap::new(), description: "killed".into() };
            let mut failures = power_failures(&self.steps, count).into_iter().chain([killed]);
            let described = |failure: PowerFailure| {
                let violation = self.violation(count, &failure)?;
                Some(format!("{} after step {count} of {}: {violation}", failure.description, self.steps.len()))
            };
            failures.find_map(described)
        })
    }
}

fn first_violation(setting: Setting) -> Option<String> {
    (0..HISTORIES + HISTORIES_WITH_USERS).find_map(|seed| {
        let violation = make_history(setting, seed).first_violation()?;
        Some(format!("seed {seed}: {violation}"))
    })
}

#[test]
fn no_crash_loses_a_flushed_write_or_a_committed_checkpoint() {
    for ignores_flushes in [false, true] {
        assert_eq!(
            first_violation(Setting { mistake: None, ignores_flushes }),
            None,
            "ignores_flushes: {ignores_flushes}"
        );
    }
}

#[test]
fn histories_merge_and_commit_enough_to_test_anything() {
    let histories: Vec<_> =
        (0..HISTORIES).map(|seed| make_history(Setting { mistake: None, ignores_flushes: false }, seed)).collect();
    let marks = || histories.iter().flat_map(|history| history.marks.keys());
    let repeated = marks().filter(|mark| mark.head.is_some_and(|head| head.number > 1)).count();
    let epochs = marks().filter(|mark| mark.head.is_none()).count();
    let removed = |beginning: &str| {
        let is_removal = |step: &&Step| matches!(step, Step::Remove(name) if name.starts_with(beginning));
        histories.iter().map(|history| history.steps.iter().filter(is_removal).count()).sum::<usize>()
    };
    let (overlays, heads) = (removed("epoch-"), removed("head-"));
    assert!(epochs > 60 && overlays > 60, "{epochs} epochs, {overlays} overlays removed");
    assert!(repeated > 30 && heads > 30, "{repeated} second heads, {heads} heads removed");
}

#[test]
fn each_mistake_is_found() {
    let mistakes = [
        (Mistake::CommitWithoutSeal, false),
        (Mistake::SealWithoutSync, true),
        (Mistake::RecordWithoutSync, false),
        (Mistake::LateFloor, false),
        (Mistake::VolatileOverlay, false),
        (Mistake::MarkWithoutFlush, false),
        (Mistake::MergeOfUncommitted, false),
        (Mistake::EarlyResume, false),
        (Mistake::HeadWithoutSync, false),
        (Mistake::HeadInPlace, false),
        (Mistake::EarlyRemovalOfHead, false),
        (Mistake::UnnoticedMerge, false),
        (Mistake::LateExposure, false),
        (Mistake::KeptAfterMerge, false),
    ];
    for (mistake, ignores_flushes) in mistakes {
        let found = first_violation(Setting { mistake: Some(mistake), ignores_flushes });
        assert!(found.is_some(), "{mistake:?} is not found");
    }
}

#[test]
fn a_directory_with_overlays_is_not_created_again() {
    let disk = CrashDisk::new(Vec::new());
    let state = || OverlayState::new("image".into(), 4096);
    let directory = OverlayDirectory::create(disk.clone(), state()).unwrap();
    directory.create_overlay(2).unwrap();
    drop(directory);
    assert!(OverlayDirectory::create(disk.clone(), state()).is_err());
    let directory = OverlayDirectory::open(disk.clone()).unwrap().unwrap();
    assert_eq!(directory.epochs().unwrap(), [2]);
    drop(directory);
    disk.change("state", |bytes| bytes.fill(0));
    assert!(matches!(OverlayDirectory::open(disk), Err(super::OverlayError::DamagedState { .. })));
}

#[test]
fn a_failed_seal_is_final_also_for_the_next_process() {
    let disk = CrashDisk::new(vec![0; 4096]);
    let mut directory = OverlayDirectory::create(disk.clone(), OverlayState::new("image".into(), 4096)).unwrap();
    directory.seal(1, None, || Err(std::io::ErrorKind::StorageFull.into())).unwrap_err();
    let is_final = |directory: &mut OverlayDirectory<CrashDisk>| {
        assert!(matches!(directory.seal(1, None, || Ok(())), Err(super::OverlayError::SealFailed { .. })));
        assert!(!directory.state().has_epoch(1));
    };
    is_final(&mut directory);
    drop(directory);
    is_final(&mut OverlayDirectory::open(disk.clone()).unwrap().unwrap());
    // The end of the overlays removes the state.
    OverlayDirectory::open(disk.clone()).unwrap().unwrap().destroy().unwrap();
    let mut again = OverlayDirectory::create(disk, OverlayState::new("image".into(), 4096)).unwrap();
    again.seal(1, None, || Ok(())).unwrap();
    assert!(again.state().has_epoch(1));
}

#[test]
fn a_restore_makes_the_epochs_after_its_own_dead() {
    let disk = CrashDisk::new(vec![0; 4096]);
    let mut directory = OverlayDirectory::create(disk.clone(), OverlayState::new("image".into(), 4096)).unwrap();
    for epoch in 2..=4 {
        directory.create_overlay(epoch).unwrap();
    }
    directory.seal(3, None, || Ok(())).unwrap();
    assert_eq!(directory.overlays_of(3).unwrap(), [2, 3]);
    assert_eq!(directory.overlays_of(1).unwrap(), [0u64; 0]);
    assert!(matches!(directory.overlays_of(4), Err(super::OverlayError::NoEpoch { .. })));
    let fresh = directory.unused_epoch().unwrap();
    assert_eq!(fresh, 5);
    directory.create_overlay(fresh).unwrap();
    directory.record(|state| state.restart_at(2, fresh, "another".into())).unwrap();
    assert_eq!(directory.overlays_of(2).unwrap(), [2]);
    assert!(directory.overlays_of(3).is_err());
    // The next mark seals the fresh epoch, and what the restore has discarded stays dead.
    directory.remove_overlay(3).unwrap();
    directory.remove_overlay(4).unwrap();
    directory.seal(5, None, || Ok(())).unwrap();
    assert_eq!(directory.overlays_of(5).unwrap(), [2, 5]);
    assert!(directory.overlays_of(3).is_err() && directory.overlays_of(4).is_err());
    directory.remove_overlay(2).unwrap();
    assert!(matches!(directory.overlays_of(5), Err(super::OverlayError::MissingEpoch { epoch: 2, .. })));
}

#[test]
fn heads_are_numbered_and_only_those_that_no_checkpoint_has_are_removed() {
    let disk = CrashDisk::new(vec![0; 4096]);
    let directory = OverlayDirectory::create(disk.clone(), OverlayState::new("image".into(), 4096)).unwrap();
    let heads: Vec<OverlayHead> = (0..4).map(|_| directory.create_head(7).unwrap()).collect();
    assert_eq!(heads.iter().map(|head| head.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let left = || heads.iter().filter(|head| directory.has_head(**head).unwrap()).map(|head| head.number);
    directory.remove_useless_heads(Some(heads[1])).unwrap();
    assert_eq!(left().collect::<Vec<_>>(), [2, 3, 4]);
    // A checkpoint in another store has a newer one.
    directory.remove_heads_after(Some(heads[0])).unwrap();
    assert_eq!(left().collect::<Vec<_>>(), [2, 3, 4]);
    directory.remove_heads_after(Some(heads[2])).unwrap();
    assert_eq!(left().collect::<Vec<_>>(), [2, 3]);
    assert_eq!(directory.create_head(7).unwrap().number, 4);
    // That of an earlier version.
    disk.create("head-000000000007.qcow2").unwrap();
    assert!(directory.has_head(OverlayHead { epoch: 7, number: 0 }).unwrap());
    assert_eq!(directory.create_head(8).unwrap().number, 1);
}

#[test]
fn a_merge_by_another_program_takes_the_disk_of_earlier_checkpoints() {
    let disk = CrashDisk::new(vec![0; 4096]);
    let mut directory = OverlayDirectory::create(disk.clone(), OverlayState::new("image".into(), 4096)).unwrap();
    directory.create_overlay(2).unwrap();
    directory.create_overlay(3).unwrap();
    directory.seal(2, None, || Ok(())).unwrap();
    directory.note_exposed().unwrap();
    drop(directory);
    let mut directory = OverlayDirectory::open(disk).unwrap().unwrap();
    assert!(directory.is_exposed().unwrap());
    directory.record(|state| state.note_changed_by_others(3)).unwrap();
    directory.note_not_exposed().unwrap();
    assert!(!directory.is_exposed().unwrap());
    directory.seal(3, None, || Ok(())).unwrap();
    let state = directory.state();
    assert!(state.is_changed_by_others(2) && !state.is_changed_by_others(3));
    assert!(directory.overlays_of(2).is_err());
    assert_eq!(directory.overlays_of(3).unwrap(), [2, 3]);
    directory.note_exposed().unwrap();
    directory.destroy().unwrap();
}

#[test]
fn a_merge_below_a_discarded_epoch_keeps_the_checkpoint_before_it() {
    let mut state = OverlayState::new("image".into(), 4096);
    state.restart_at(3, 6, "another".into());
    state.restart_at(3, 9, "a third".into());
    let after = |up_to: u64| {
        let mut state = state.clone();
        state.sealed = 9;
        state.note_merged(up_to);
        (state.floor, state.merged, state.has_epoch(3))
    };
    assert_eq!(after(8), (3, 8, true));
    assert_eq!(after(3), (3, 3, true));
    assert_eq!(after(9), (9, 9, false));
}
