//! A drain of real QEMUs, with a disk whose answers come late.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_qemu::drain::drain;
use rekindle_qemu::guest;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use std::io::{BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// An NBD server that answers a read only after a while.
struct SlowDisk {
    /// Receives a message for each read that has arrived.
    arrived: Receiver<()>,
    /// Number of reads that were answered.
    answered: &'static AtomicU64,
}

/// Bytes of the slow disk.
const SLOW_DISK_BYTES: u64 = 1 << 20;
/// Time from a read to its answer: more than a QMP command without a drain takes.
const ANSWER_DELAY: Duration = Duration::from_millis(700);

impl SlowDisk {
    fn serve(socket: PathBuf) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let (arrival, arrived) = channel();
        let answered: &'static AtomicU64 = Box::leak(Box::default());
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            negotiate(&stream);
            let mut requests = BufReader::new(&stream);
            let mut request = [0; 28];
            // Magic, flags and type, handle, offset, length; all big-endian.
            while requests.read_exact(&mut request).is_ok() {
                let length = u32::from_be_bytes(request[24..28].try_into().unwrap());
                let _ = arrival.send(());
                thread::sleep(ANSWER_DELAY);
                let mut answer = 0x6744_6698u32.to_be_bytes().to_vec();
                answer.extend([0; 4]);
                answer.extend(&request[8..16]);
                answer.resize(answer.len() + length as usize, 0);
                answered.fetch_add(1, Ordering::SeqCst);
                if (&stream).write_all(&answer).is_err() {
                    return;
                }
            }
        });
        Self { arrived, answered }
    }
}

/// Greets an NBD client (`proto.md` of NBD), which may request any export. Knows only the option to choose an export.
fn negotiate(mut stream: &UnixStream) {
    const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
    const NBD_OPT_GO: u32 = 7;
    stream.write_all(b"NBDMAGIC").unwrap();
    stream.write_all(OPTION_MAGIC).unwrap();
    // Fixed new-style handshake, no zeros.
    stream.write_all(&3u16.to_be_bytes()).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(&header[..8], OPTION_MAGIC);
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(header[12..16].try_into().unwrap()) as usize];
        stream.read_exact(&mut data).unwrap();
        let mut reply = |kind: u32, data: &[u8]| {
            let mut reply = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            reply.extend(option.to_be_bytes());
            reply.extend(kind.to_be_bytes());
            reply.extend((data.len() as u32).to_be_bytes());
            reply.extend(data);
            stream.write_all(&reply).unwrap();
        };
        if option != NBD_OPT_GO {
            // Unsupported.
            reply(1 << 31 | 1, &[]);
            continue;
        }
        // Information about the export: its size, and that it has flags and is read-only.
        let mut export = 0u16.to_be_bytes().to_vec();
        export.extend(SLOW_DISK_BYTES.to_be_bytes());
        export.extend(3u16.to_be_bytes());
        reply(3, &export);
        // Acknowledged: requests follow.
        reply(1, &[]);
        return;
    }
}

#[test]
fn a_drain_waits_for_the_disk_reads_in_flight_while_the_guest_runs() {
    for binary in [qemu_old(), qemu_new(), qemu_newest()] {
        for iothread in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let socket = directory.path().join("disk");
            let disk = SlowDisk::serve(socket.clone());
            let drive =
                format!("driver=nbd,server.type=unix,server.path={},node-name=d,read-only=on", socket.display());
            let device = format!("virtio-blk-pci,drive=d{}", if iothread { ",iothread=io" } else { "" });
            let options = QemuOptions::new(binary).arguments(&["-machine", "q35", "-m", "192M"]);
            let options = options.arguments(&["-object", "iothread,id=io", "-blockdev", &drive, "-device", &device]);
            let qemu = ForeignQemu::start(directory.path(), &options);
            let mut qmp = qemu.qmp();
            // QEMU reads the disk when it opens it, and the guest reads the partition table.
            for read in 1..=2 {
                disk.arrived
                    .recv_timeout(rekindle_testing::DEADLINE)
                    .unwrap_or_else(|e| panic!("{e}: {}", qemu.output()));
                drain(&mut qmp).unwrap();
                let answered = disk.answered.load(Ordering::SeqCst);
                assert!(answered >= read, "{}, read {read}: {answered} answered", binary.display());
                assert_eq!(guest::run_state(&mut qmp).unwrap(), "running");
            }
        }
    }
}
