use super::*;
use rekindle_disk::redo::directory::LogDirectory;
use rekindle_disk::redo::files::LocalFiles;
use rekindle_disk::redo::format::{EntryKind, PAGE_BYTES, segment_name};
use rekindle_disk::redo::log::seal::SealRecord;
use rekindle_disk::redo::log::{Log, SpaceLimit};
use rekindle_disk::redo::offline;
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use rekindle_qemu::command::Ram;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use uuid::Uuid;

const IMAGE_BYTES: u64 = 1 << 20;

/// Returns a machine with one disk that has a server.
pub(crate) fn hardware(image: &Path) -> Hardware {
    let disk = Disk {
        id: "disk0".into(),
        path: image.into(),
        format: "raw".into(),
        readonly: false,
        cache: "none".into(),
        serial: None,
        server: true,
        redo: None,
        attic_keep_ms: None,
        bps: None,
        iops: None,
    };
    Hardware {
        name: "vm".into(),
        uuid: None,
        machine: "pc".into(),
        cpu: "max".into(),
        accel: "tcg".into(),
        vcpus: 1,
        ram: Ram { path: "ram".into(), bytes: 1 << 20, prealloc: false },
        boot: None,
        disks: vec![disk],
        nets: Vec::new(),
        vga: false,
        agent: false,
        rng: false,
        vm_generation: None,
        agent_ports: None,
        phase: false,
        panic: false,
        extra: Vec::new(),
        foreign: None,
    }
}

/// Creates a log with two sealed epochs of one entry each, none of them merged.
fn make_log(image: &Path) -> Uuid {
    File::create(image).unwrap().set_len(IMAGE_BYTES).unwrap();
    let files = LocalFiles::new(&offline::default_directory(image), false);
    let mut log_dir = LogDirectory::create(files, IMAGE_BYTES, offline::image_name(image)).unwrap();
    let disk = log_dir.state().disk;
    let mut log = Log::new(disk, 1, 0, 0, u64::MAX);
    for epoch in [1, 2] {
        for missing in log.missing_segments() {
            log.add_ready(log_dir.create_segment(missing).unwrap());
        }
        let placed = log.allocate(0, PAGE_BYTES, EntryKind::Data, SpaceLimit::Enforced).unwrap();
        let mut entry = Buffer::new(placed.length() as usize);
        let header = log.entry_header(&placed, &[0; PAGE_BYTES as usize]);
        entry[..PAGE_BYTES as usize].copy_from_slice(&header);
        log.segment_file(epoch).unwrap().write_at(&entry, placed.offset).unwrap();
        log.complete_write(&placed);
        assert_eq!(log.mark(), Some(epoch));
        for segment in log.segments_to_seal(epoch).unwrap() {
            assert_eq!(segment.make_durable(image).unwrap(), SealRecord::Written);
        }
        log_dir.record(|state| state.seal(epoch, &[epoch])).unwrap();
        log.mark_sealed(&[epoch]);
    }
    disk
}

#[test]
fn damage_to_a_later_epoch_does_not_prevent_a_restore_of_an_older_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.raw");
    let disk = make_log(&image);
    let hardware = hardware(&image);
    let at = |epoch| Epochs::from([("disk0".to_owned(), EpochId { disk, epoch })]);
    for epochs in [Epochs::new(), at(1), at(2)] {
        assert_eq!(redo_log_problems(&hardware, &epochs, LeftoverLogs::Use), Vec::<String>::new());
    }
    let segment = offline::default_directory(&image).join(segment_name(2));
    OpenOptions::new().write(true).open(&segment).unwrap().write_all_at(&[0xff], PAGE_BYTES + 20).unwrap();
    assert_eq!(redo_log_problems(&hardware, &at(1), LeftoverLogs::Use), Vec::<String>::new());
    // For the newest version, and for the newer checkpoint.
    for epochs in [Epochs::new(), at(2)] {
        let problems = redo_log_problems(&hardware, &epochs, LeftoverLogs::Use);
        assert!(problems.len() == 1 && problems[0].contains("2.log"), "{problems:?}");
    }
    // The identity of the disk does not depend on its segments.
    assert_eq!(identity_problems(&hardware, &at(2)), Vec::<String>::new());
    let of_other_disk = Epochs::from([("disk0".to_owned(), EpochId { disk: Uuid::nil(), epoch: 2 })]);
    assert!(identity_problems(&hardware, &of_other_disk)[0].contains("another disk"));
}
