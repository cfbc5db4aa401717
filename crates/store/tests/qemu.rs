//! Export and import with QEMU: a stock QEMU loads an exported stream with all pages unchanged, and the store imports a
//! stream that QEMU has saved.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_kernel::memory;
use rekindle_kernel::process::Process;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::{self, RamBlock};
use rekindle_store::export::{export, import};
use rekindle_store::types::{Block, Vm};
use rekindle_store::{Image, Options, ReadOptions, StoreUrl, Writer};
use serde_json::{Value, json};
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(60);

/// A QEMU without a disk. Its firmware runs, finds no boot device, and waits.
struct Guest {
    child: Child,
    qmp: Qmp,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Guest {
    fn start(directory: &Path, name: &str, more: &[&str]) -> Self {
        let binary = env::var_os("QEMU_NEW").map_or_else(|| PathBuf::from("qemu-system-x86_64"), PathBuf::from);
        let socket = directory.join(format!("{name}.sock"));
        let child = Command::new(binary)
            .args(["-accel", "tcg", "-machine", "pc-q35-7.2,suppress-vmdesc=on", "-m", "64M", "-nodefaults"])
            .args(["-vga", "std", "-display", "none"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        let qmp = loop {
            match Qmp::connect(&socket, PATIENCE) {
                Ok(qmp) => break qmp,
                Err(e) => assert!(Instant::now() < deadline, "{e}"),
            }
            thread::sleep(Duration::from_millis(20));
        };
        Self { child, qmp }
    }

    /// Returns all RAM blocks with their content.
    fn memory(&mut self) -> Vec<(RamBlock, Vec<u8>)> {
        let process = Process::of(self.child.id()).unwrap();
        let blocks = ramblock::list(&mut self.qmp).unwrap();
        let read = |block: RamBlock| {
            let mut content = vec![0; block.used as usize];
            memory::read(process, block.address.expect("a QEMU that reports RAM addresses"), &mut content).unwrap();
            (block, content)
        };
        blocks.into_iter().map(read).collect()
    }

    /// Loads a stream, and waits until it is loaded.
    fn load(&mut self, stream: &Path) {
        self.qmp
            .execute::<Value>("migrate-incoming", json!({"uri": format!("exec:cat {}", stream.display())}))
            .unwrap();
        self.wait("query-migrate", "completed");
    }

    fn wait(&mut self, query: &str, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status: Value = self.qmp.execute(query, ()).unwrap();
            match status["status"].as_str() {
                Some(status) if status == wanted => return,
                Some("failed") => panic!("{status}"),
                _ => assert!(Instant::now() < deadline, "{status}"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

const OFF: [&str; 2] = ["-global", "migration.send-configuration=off"];

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(7), name: "web".into() }
}

fn assert_same(what: &str, loaded: &mut Guest, expected: &[(RamBlock, Vec<u8>)]) {
    let found = loaded.memory();
    for (block, content) in expected {
        let (_, there) = found.iter().find(|(there, _)| there.id == block.id).unwrap();
        let pages = content.chunks(PAGE_SIZE).zip(there.chunks(PAGE_SIZE));
        let other: Vec<_> = pages.enumerate().filter(|(_, (a, b))| a != b).map(|(page, _)| page).collect();
        assert_eq!(other, Vec::<usize>::new(), "{what}: pages of {} that differ", block.id);
    }
}

#[test]
fn a_stock_qemu_loads_what_is_exported_and_what_it_saves_is_imported() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut guest = Guest::start(directory.path(), "first", &OFF);
    // Waits until the firmware has written to RAM.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let filled = guest.memory().iter().find(|(block, _)| block.id == "pc.ram").map_or(0, |(_, content)| {
            content.chunks(PAGE_SIZE).filter(|page| page.iter().any(|byte| *byte != 0)).count()
        });
        if filled > 50 {
            break;
        }
        assert!(Instant::now() < deadline, "{filled} pages");
        thread::sleep(Duration::from_millis(50));
    }
    guest.qmp.execute::<Value>("stop", ()).unwrap();
    guest.wait("query-status", "paused");
    let memory = guest.memory();
    let state = path("devices");
    let save = json!({"filename": state, "live": false});
    guest.qmp.execute::<Value>("xen-save-devices-state", save).unwrap();

    let url = StoreUrl::Directory(path("store"));
    let mut writer = Writer::open(&url, &Options { create: true, ..Options::new(vm(), "test") }).unwrap();
    let blocks: Vec<Block> = memory
        .iter()
        .map(|(block, _)| Block { id: block.id.clone(), used: block.used, max: block.used, page_size: 4096 })
        .collect();
    let mut checkpoint = writer.begin(&blocks).unwrap();
    for (position, (_, content)) in memory.iter().enumerate() {
        checkpoint.pages(BlockId(position), (0..).map(PageNo).zip(content.as_chunks::<PAGE_SIZE>().0)).unwrap();
    }
    let committed = checkpoint.commit(&json!({}), &json!({}), &fs::read(&state).unwrap()).unwrap();
    assert!(committed.pages.stored > 50 && committed.pages.unchanged > 10_000, "{committed:?}");
    drop(writer);

    let image = Image::open(&url, &ReadOptions::default()).unwrap();
    let plain = path("plain");
    let bytes = export(&image, &mut File::create(&plain).unwrap(), None, &mut |_, _| {}).unwrap();
    assert_eq!(bytes, fs::metadata(&plain).unwrap().len());
    let mut args = vec!["-S", "-incoming", "defer"];
    args.extend(OFF);
    let mut second = Guest::start(directory.path(), "second", &args);
    second.load(&plain);
    assert_same("exported", &mut second, &memory);
    second.qmp.execute::<Value>("cont", ()).unwrap();
    second.wait("query-status", "running");
    drop(second);

    // A stream for a QEMU with default options.
    let named = path("named");
    export(&image, &mut File::create(&named).unwrap(), Some("pc-q35-7.2"), &mut |_, _| {}).unwrap();
    let mut third = Guest::start(directory.path(), "third", &["-S", "-incoming", "defer"]);
    third.load(&named);
    assert_same("exported with the machine's name", &mut third, &memory);

    // A stream that this QEMU saves itself with default options.
    let saved = path("saved");
    third.qmp.execute::<Value>("migrate", json!({"uri": format!("exec:cat > {}", saved.display())})).unwrap();
    third.wait("query-migrate", "completed");
    drop(third);
    let url = StoreUrl::Directory(path("imported"));
    let mut writer = Writer::open(&url, &Options { create: true, ..Options::new(vm(), "test") }).unwrap();
    let committed = import(&mut writer, File::open(&saved).unwrap(), &json!({"by": "qemu"}), &mut |_| {}).unwrap();
    assert_eq!(committed.number, 1);
    drop(writer);
    let image = Image::open(&url, &ReadOptions::default()).unwrap();
    for (block, content) in &memory {
        let position = image.block(&block.id).unwrap_or_else(|| panic!("{} is not there", block.id));
        image
            .read_pages(position, PageNo(0)..PageNo::containing(block.used), |page, found| {
                let at = page.offset() as usize;
                assert!(found[..] == content[at..at + PAGE_SIZE], "page {page} of {}", block.id);
            })
            .unwrap();
    }
    assert_eq!(image.metadata().unwrap()["machine"], "pc-q35-7.2");
    let again = path("again");
    export(&image, &mut File::create(&again).unwrap(), Some("pc-q35-7.2"), &mut |_, _| {}).unwrap();
    let mut fourth = Guest::start(directory.path(), "fourth", &["-S", "-incoming", "defer"]);
    fourth.load(&again);
    assert_same("imported and exported", &mut fourth, &memory);
}
