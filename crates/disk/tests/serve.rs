//! A disk as a guest sees it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{
    DEADLINE, DataPiece, Disk, FIRST_FREE_FRAME, FRONT_END_ADDRESS, GET_ID, Guest, GuestRequest, IN, OUT, PAGE,
    RingState, content, wait_for,
};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::engine::command::Status;
use rekindle_disk::image::ImageError;
use rekindle_disk::limit::Limits;
use rekindle_disk::server::{ServeError, serve};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::time::Instant;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vmm_sys_util::eventfd::EventFd;

#[test]
fn written_data_is_on_the_disk_and_is_read_back() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    for block in 0..64 {
        assert_eq!(guest.read(block, FIRST_FREE_FRAME + block), content(block, 0));
    }
    for block in [0, 7, 63] {
        guest.write(block, FIRST_FREE_FRAME, &content(block, 1));
        assert_eq!(disk.block(block), content(block, 1));
        assert_eq!(guest.read(block, FIRST_FREE_FRAME + 1), content(block, 1));
    }
    assert_eq!(guest.request(&GuestRequest::flush()), 0);
    assert_eq!(disk.block(1), content(1, 0), "its neighbour is as it was");
}

#[test]
fn a_guest_that_checks_only_when_notified_sees_every_answer() {
    let disk = Disk::new(1024);
    let mut guest = Guest::start(&disk.socket());
    // A previous server may have been killed between an answer and its notification.
    wait_for("the notification of a queue that starts", || guest.is_notified(0).then_some(()));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..200 {
        let count = random.usize(1..=16);
        for n in 0..count as u64 {
            // Answers of large requests are notified without delay, those of small ones together.
            let pages = if random.u8(..8) == 0 { 150 } else { 1 };
            let data = vec![DataPiece::writable((FIRST_FREE_FRAME + n * 150) * PAGE, pages * PAGE)];
            let ask = match random.u8(..4) {
                0 => GuestRequest::flush(),
                _ => GuestRequest { kind: IN, sector: random.u64(..512) * 8, data },
            };
            guest.add_request(0, &ask);
            if random.bool() {
                guest.kick(0);
            }
        }
        guest.kick(0);
        let mut completed = 0;
        while completed < count {
            wait_for("a notification", || guest.is_notified(0).then_some(()));
            let found = guest.take_completed(0);
            assert!(found.iter().all(|completed| completed.status == 0));
            completed += found.len();
        }
    }
    let call = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    guest.front.set_vring_call(0, &call).unwrap();
    wait_for("the notification of a new descriptor", || call.read().ok());
}

#[test]
fn requests_of_any_shape_and_many_at_a_time_are_done() {
    let disk = Disk::new(1024);
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 2);
    guest.run(0, RingState::Empty);
    guest.run(1, RingState::Empty);
    // Begins within a block and at an unaligned address, and is longer than one operation.
    let long =
        GuestRequest { kind: IN, sector: 3, data: vec![DataPiece::writable(FIRST_FREE_FRAME * PAGE + 100, 3 << 20)] };
    assert_eq!(guest.request(&long), 0);
    let mut expected: Vec<u8> = (0..1024).flat_map(|block| content(block, 0)).collect();
    expected.drain(..3 * 512);
    expected.truncate(3 << 20);
    let mut got = vec![0; 3 << 20];
    std::os::unix::fs::FileExt::read_exact_at(&guest.memory, &mut got, FIRST_FREE_FRAME * PAGE + 100).unwrap();
    assert!(got == expected);
    // Both queues full, with all kinds of requests.
    for queue in [0, 1] {
        for n in 0..16 {
            let block = u64::from(queue) * 100 + n;
            let frame = FIRST_FREE_FRAME + u64::from(queue) * 16 + n;
            guest.fill(frame, &content(block, 1));
            let ask = if n % 5 == 4 { GuestRequest::flush() } else { GuestRequest::write(block, frame) };
            guest.add_request(queue, &ask);
        }
        guest.kick(queue);
    }
    for queue in [0, 1] {
        let mut completed = Vec::new();
        wait_for("all of a queue", || {
            completed.extend(guest.take_completed(queue));
            (completed.len() == 16).then_some(())
        });
        assert!(completed.iter().all(|completed| (completed.written, completed.status) == (1, 0)), "{completed:?}");
        for n in (0..16).filter(|n| n % 5 != 4) {
            let block = u64::from(queue) * 100 + n;
            assert_eq!(disk.block(block), content(block, 1));
        }
    }
}

#[test]
fn an_invalid_request_fails_and_later_ones_are_served() {
    let disk = Disk::new(16);
    let mut guest = Guest::start(&disk.socket());
    let page = DataPiece::writable(FIRST_FREE_FRAME * PAGE, PAGE);
    let behind = GuestRequest { kind: IN, sector: 16 * 8, data: vec![page] };
    // The status of an answer: 1 is an I/O error, 2 an unsupported request.
    assert_eq!(guest.request(&behind), 1);
    assert_eq!(guest.request(&GuestRequest { kind: 77, sector: 0, data: vec![page] }), 2);
    assert_eq!(
        guest.request(&GuestRequest { kind: IN, sector: 0, data: vec![DataPiece::writable(1 << 40, PAGE)] }),
        1,
        "no memory there"
    );
    assert_eq!(
        guest.request(&GuestRequest { kind: OUT, sector: 0, data: vec![DataPiece::readable(1 << 40, PAGE)] }),
        1
    );
    assert_eq!(disk.block(0), content(0, 0));
    // The serial number.
    assert_eq!(
        guest.request(&GuestRequest {
            kind: GET_ID,
            sector: 0,
            data: vec![DataPiece::writable(FIRST_FREE_FRAME * PAGE, 20)]
        }),
        0
    );
    assert_eq!(&guest.frame(FIRST_FREE_FRAME)[..13], b"rekindle-test");
    assert_eq!(guest.read(3, FIRST_FREE_FRAME), content(3, 0), "it is served as ever");
}

#[test]
fn discarded_and_zeroed_blocks_are_zero_and_their_neighbours_are_not() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    // 11 is a discard, and 13 a request to write zeros, of which flag 1 permits releasing the space.
    for (kind, block, flags) in [(11, 8, 0), (13, 16, 0), (13, 24, 1)] {
        // 32 sectors are 4 blocks.
        let mut page = range(block * 8, 32, flags);
        page.resize(PAGE as usize, 0);
        guest.fill(FIRST_FREE_FRAME, &page);
        assert_eq!(
            guest.request(&GuestRequest {
                kind,
                sector: 0,
                data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 16)]
            }),
            0,
            "{kind}"
        );
        for of in block..block + 4 {
            assert!(guest.read(of, FIRST_FREE_FRAME + 1).iter().all(|byte| *byte == 0), "{kind}: block {of}");
        }
        assert_eq!(guest.read(block - 1, FIRST_FREE_FRAME + 1), content(block - 1, 0));
        assert_eq!(guest.read(block + 4, FIRST_FREE_FRAME + 1), content(block + 4, 0));
    }
}

#[test]
fn a_guest_learns_the_size_of_its_disk_and_that_it_has_grown() {
    let disk = Disk::with(16, |service| service.mode.readonly = true);
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 1);
    let features = guest.front.get_features().unwrap();
    // VIRTIO_BLK_F_RO.
    assert_ne!(features & (1 << 5), 0, "read-only");
    // The first field of `virtio_blk_config`, in sectors of 512 bytes: 8 for each page.
    let capacity = |guest: &mut Guest| {
        let (_, bytes) = guest.front.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    };
    assert_eq!(capacity(&mut guest), 128);
    let channel = guest.listen();
    guest.run(0, RingState::Empty);
    // The disk may have grown since QEMU read its length: before this server started, or between the two.
    let mut message = [0; 12];
    (&channel).read_exact(&mut message).unwrap();
    assert_eq!(guest.request(&GuestRequest::write(0, FIRST_FREE_FRAME)), 1);
    assert_eq!(guest.request(&GuestRequest::read(16, FIRST_FREE_FRAME)), 1);
    OpenOptions::new().write(true).open(&disk.image).unwrap().set_len(32 * PAGE).unwrap();
    assert_eq!(disk.control().ask::<u64>(&ControlCommand::UpdateLength {}).unwrap(), 32 * PAGE);
    (&channel).read_exact(&mut message).unwrap();
    assert_eq!(message, *[2u32, 1, 0].map(u32::to_ne_bytes).concat(), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    assert_eq!(capacity(&mut guest), 256);
    assert_eq!(guest.request(&GuestRequest::read(31, FIRST_FREE_FRAME)), 0);
    OpenOptions::new().write(true).open(&disk.image).unwrap().set_len(16 * PAGE).unwrap();
    let refused = disk.control().ask::<u64>(&ControlCommand::UpdateLength {}).unwrap_err().to_string();
    assert!(refused.contains("was 131072"), "{refused}");
    // A stopped guest's QEMU is notified again when the guest continues: it does not listen before.
    guest.stop(0);
    OpenOptions::new().write(true).open(&disk.image).unwrap().set_len(64 * PAGE).unwrap();
    assert_eq!(disk.control().ask::<u64>(&ControlCommand::UpdateLength {}).unwrap(), 64 * PAGE);
    (&channel).read_exact(&mut message).unwrap();
    guest.run(0, RingState::Empty);
    (&channel).read_exact(&mut message).unwrap();
    // QEMU discards a notification that it reads while it is stopping the guest.
    guest.stop(0);
    guest.run(0, RingState::Empty);
    (&channel).read_exact(&mut message).unwrap();
    assert_eq!(capacity(&mut guest), 512);
    // Nothing has grown since QEMU has read the length.
    guest.stop(0);
    guest.run(0, RingState::Empty);
    channel.set_nonblocking(true).unwrap();
    assert_eq!((&channel).read(&mut message).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn of_two_servers_the_second_is_rejected_and_changes_nothing() {
    let disk = Disk::new(16);
    let mut guest = Guest::start(&disk.socket());
    let mut second = disk.service();
    assert!(matches!(serve(second.clone(), |_| ()), Err(ServeError::Image(ImageError::InUse { .. }))));
    // The second server has another image, with the same sockets.
    second.image = disk.directory.path().join("other.raw");
    std::fs::write(&second.image, [0; 4096]).unwrap();
    assert!(matches!(serve(second, |_| ()), Err(ServeError::Busy { .. })));
    assert_eq!(guest.read(3, FIRST_FREE_FRAME), content(3, 0));
}

#[test]
fn of_two_front_ends_only_one_has_running_queues() {
    let disk = Disk::new(64);
    let mut old = Guest::connect(&disk.socket(), common::memory(), 1);
    old.run(0, RingState::Empty);
    assert_eq!(old.read(1, FIRST_FREE_FRAME), content(1, 0));
    // As in a restart of the VMM: the second front end has the same memory, and waits.
    let mut new = Guest::connect(&disk.socket(), old.memory.try_clone().unwrap(), 1);
    assert!(new.try_run(0, RingState::Kept).is_err(), "the old one still runs");
    drop(new);
    let mut new = Guest::connect(&disk.socket(), old.memory.try_clone().unwrap(), 1);
    let block = disk.control().status().unwrap().mapped_blocks;
    let base = old.stop(0);
    assert_eq!(base, 1);
    new.continue_from(&old);
    new.run(0, RingState::Kept);
    assert_eq!(new.read(2, FIRST_FREE_FRAME + 1), content(2, 0));
    assert_eq!(disk.control().status().unwrap().mapped_blocks, block + 1, "the map is kept: it is the same guest");
    drop(old);
    assert_eq!(new.read(3, FIRST_FREE_FRAME + 2), content(3, 0));
    // After it disconnects, another guest with other memory is served.
    drop(new);
    wait_for("the front end to have gone", || (!disk.control().status().unwrap().active).then_some(()));
    let mut other = Guest::start(&disk.socket());
    assert_eq!(other.read(4, FIRST_FREE_FRAME), content(4, 0));
    assert_eq!(disk.control().status().unwrap().mapped_blocks, 1);
}

#[test]
fn pages_that_the_server_writes_are_reported_on_request() {
    let disk = Disk::new(64);
    let mut guest = Guest::start(&disk.socket());
    guest.read(1, FIRST_FREE_FRAME);
    let mut control = disk.control();
    let mut note = |pid| control.ask::<bool>(&ControlCommand::RecordPages { pid });
    assert!(disk.control().collect().is_err(), "not requested");
    assert!(note(Some(1)).is_err(), "no such front end");
    let me = Some(std::process::id());
    assert!(!note(me).unwrap());
    guest.read(1, FIRST_FREE_FRAME + 5);
    guest.write(2, FIRST_FREE_FRAME + 7, &content(2, 1));
    assert!(note(me).unwrap(), "it continues");
    let written = disk.control().collect().unwrap();
    let is_written = |frame: u64| {
        let address = FRONT_END_ADDRESS + frame * PAGE;
        written.iter().any(|span| (span.address..span.address + span.bytes).contains(&address))
    };
    assert!(is_written(FIRST_FREE_FRAME + 5) && !is_written(FIRST_FREE_FRAME + 7), "{written:?}");
    assert!((0..64).any(is_written), "the used ring too: {written:?}");
    assert!(disk.control().collect().unwrap().is_empty());
    drop(guest);
    wait_for("the front end to have gone", || disk.control().collect().is_err().then_some(()));
}

#[test]
fn a_disk_keeps_its_rate_limit() {
    let limits = Limits { bps: None, iops: Some(200) };
    let disk = Disk::with(64, |service| service.settings.limits = limits);
    let mut guest = Guest::start(&disk.socket());
    let took = |guest: &mut Guest, count: u64| {
        let began = Instant::now();
        (0..count).for_each(|n| drop(guest.read(n, FIRST_FREE_FRAME)));
        began.elapsed()
    };
    // Checks only the shortest time: a longest time would depend on the machine. Requests may be ahead of the rate by a
    // tenth of a second, which is 20 of them. So the 60th begins when 59 - 20 = 39 requests' time has passed.
    assert!(took(&mut guest, 60).as_secs_f64() >= 39.0 / 200.0);
    disk.control().ask::<()>(&ControlCommand::SetLimits { bps: None, iops: None }).unwrap();
    assert!(took(&mut guest, 60) < DEADLINE);
}

#[test]
fn invalid_commands_on_the_control_socket_get_an_error() {
    let disk = Disk::new(4);
    let answer = |text: &str| {
        use std::io::{BufRead, BufReader, Write};
        let mut stream = std::os::unix::net::UnixStream::connect(disk.service().control).unwrap();
        writeln!(stream, "{text}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    };
    for text in ["", "{}", "[1]", r#"{"command": "sing"}"#, r#"{"command": "status", "loud": true}"#] {
        assert!(answer(text).contains("not a question to a disk"), "{text}");
    }
    // One answer for the whole line, and not one for each 64 KiB.
    assert!(answer(&"x".repeat(200_000)).contains("at most 65536 bytes"));
    let status: Status = disk.control().status().unwrap();
    assert_eq!((status.bytes, status.active, status.requests_in_progress), (4 * PAGE, false, 0));
}
