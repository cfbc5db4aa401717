//! A store is created only on request, never for a mistyped path or on a file system that is not mounted.

use super::model::{Change, Model, image, vm};
use crate::admin;
use crate::directory::StoreDirectory;
use crate::disk::Disk;
use crate::engine::{Engine, EngineSettings};
use crate::error::{Result, StoreError};
use crate::fencing::fence;
use crate::format::names;
use crate::types::{Guest, Owner, Vm};
use crate::url::StoreUrl;
use rekindle_testing::crash_disk::{CrashDisk, Fate};
use rustix::io::Errno;
use std::fs;
use std::sync::Arc;
use uuid::Uuid;

fn open(disk: &CrashDisk, vm: &Vm, create: bool) -> Result<Engine> {
    let settings = EngineSettings { keep: 3, segment: 48 << 10, create };
    Engine::open(Arc::new(disk.clone()), vm, &Owner::here("protect web"), None, settings)
}

fn init(disk: &CrashDisk) -> Result<()> {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    StoreDirectory::init(&disk)
}

fn other() -> Vm {
    Vm { uuid: Uuid::from_u128(9), name: "other".into() }
}

#[test]
fn nothing_creates_a_store_that_was_not_asked_to() {
    let disk = CrashDisk::default();
    let boot = Owner::here("start web").with(Guest::Booted);
    assert!(matches!(open(&disk, &vm(), false), Err(StoreError::NotAStore { .. })));
    let fenced = fence(Arc::new(disk.clone()), &vm(), &boot, None);
    assert!(matches!(fenced, Err(StoreError::NotAStore { .. })));
    assert!(disk.names().is_empty(), "{:?}", disk.names());
    open(&disk, &vm(), true).unwrap();
    open(&disk, &vm(), false).unwrap();
    fence(Arc::new(disk.clone()), &vm(), &boot, None).unwrap();
}

#[test]
fn a_new_store_belongs_to_the_first_vm_that_uses_it() {
    let disk = CrashDisk::default();
    init(&disk).unwrap();
    assert!(matches!(image(&disk, None), Err(StoreError::Unused { .. })));
    let e = init(&disk).unwrap_err();
    assert!(matches!(e, StoreError::Exists { vm: None, .. }), "{e}");
    let mut model = Model { keep: 3, ..Model::default() };
    let change = Change { blocks: vec![("ram", 20)], pages: vec![(0, 1, 2)] };
    model.commit(&mut open(&disk, &vm(), false).unwrap(), &change).unwrap();
    model.check(&disk);
    assert!(!disk.names().iter().any(|name| name == names::UNUSED), "{:?}", disk.names());
    assert!(matches!(open(&disk, &other(), false), Err(StoreError::OtherVm { .. })));
    assert!(matches!(open(&disk, &other(), true), Err(StoreError::OtherVm { .. })));
    let before = disk.names();
    let e = init(&disk).unwrap_err();
    assert!(matches!(&e, StoreError::Exists { vm: Some(found), .. } if found.name == "web"), "{e}");
    assert_eq!(disk.names(), before);
    model.check(&disk);
}

/// Like [`a_new_store_belongs_to_the_first_vm_that_uses_it`], but the first VM's process was killed before it removed
/// the file of the unused store.
#[test]
fn what_is_left_of_an_unused_store_gives_it_to_no_other_vm() {
    let disk = CrashDisk::default();
    open(&disk, &vm(), true).unwrap();
    drop(Disk::create(&disk, names::UNUSED).unwrap());
    assert!(matches!(open(&disk, &other(), false), Err(StoreError::OtherVm { .. })));
    assert!(matches!(init(&disk), Err(StoreError::Exists { vm: Some(_), .. })));
    open(&disk, &vm(), false).unwrap();
    assert!(!disk.names().iter().any(|name| name == names::UNUSED), "{:?}", disk.names());
}

/// The creation fails at each step. The next process must not rely on what was not synced.
#[test]
fn a_store_whose_creation_failed_survives_a_power_failure_once_it_is_used() {
    let mut steps_of_creation = 0;
    for after in 0.. {
        let disk = CrashDisk::default();
        disk.fail_once_after(after, Errno::IO.raw_os_error());
        let is_created = open(&disk, &vm(), true).is_ok();
        let has_failed = disk.has_failed();
        disk.stop_failing();
        let mut model = Model { keep: 3, ..Model::default() };
        let change = Change { blocks: vec![("ram", 20)], pages: vec![(0, 1, 2)] };
        model.commit(&mut open(&disk, &vm(), true).unwrap(), &change).unwrap();
        let steps = disk.recorded_steps();
        let volatile = CrashDisk::volatile(&steps, steps.len());
        let fates = volatile.into_iter().map(|step| (step, Fate::Lost)).collect();
        model.check(&CrashDisk::after_crash(&[], &steps, steps.len(), &fates));
        steps_of_creation += usize::from(!is_created);
        if !has_failed {
            break;
        }
    }
    assert!(steps_of_creation > 15, "{steps_of_creation}");
}

#[test]
fn a_directory_with_something_else_and_a_file_are_named() {
    let root = tempfile::tempdir().unwrap();
    let url = |name: &str| StoreUrl::Directory(root.path().join(name));
    fs::write(root.path().join("passwd"), "root").unwrap();
    for e in [
        admin::init(&url("passwd"), None).unwrap_err(),
        admin::init(&url("passwd/below"), None).unwrap_err(),
        admin::listing(&url("passwd"), None).unwrap_err(),
        admin::listing(&url("passwd/below"), None).unwrap_err(),
    ] {
        assert!(matches!(e, StoreError::NotADirectory { .. }), "{e}");
        assert!(!e.to_string().contains("rekindle-store"), "{e}");
    }
    fs::create_dir(root.path().join("photos")).unwrap();
    fs::write(root.path().join("photos/holiday.jpg"), "").unwrap();
    let e = admin::init(&url("photos"), None).unwrap_err();
    assert!(matches!(&e, StoreError::NotEmpty { found, .. } if found == "holiday.jpg"), "{e}");
    assert_eq!(fs::read_dir(root.path().join("photos")).unwrap().count(), 1);
    admin::init(&url("new"), None).unwrap();
    let e = admin::listing(&url("new"), None).unwrap_err();
    assert!(matches!(e, StoreError::Unused { .. }), "{e}");
}
