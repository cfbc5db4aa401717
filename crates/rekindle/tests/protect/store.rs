//! `rekindle store`: text output, JSON output, and exit status.

use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_store::types::{Block, Vm};
use rekindle_store::{Options, StoreUrl, Writer};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use uuid::Uuid;

fn command<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    command.arg("store").args(arguments).env_remove("REKINDLE_LOG").stdin(Stdio::null());
    command
}

/// Runs `rekindle store`, which must end with exit status `status`.
fn store<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, status: i32) -> Output {
    let output = command(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(status), "{output:?}");
    output
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn json_of(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

/// Creates a store with three checkpoints of a VM.
fn sample(path: &Path) -> String {
    let vm = Vm { uuid: Uuid::from_u128(7), name: "web".into() };
    let url = StoreUrl::Directory(path.to_owned());
    let mut writer = Writer::open(&url, &Options { create: true, ..Options::new(vm, "protect web") }).unwrap();
    let blocks = [("pc.ram", 200u64), ("pc.bios", 3)].map(|(id, pages)| Block {
        id: id.into(),
        used: pages * 4096,
        max: pages * 4096,
        page_size: 4096,
    });
    for round in 1..=3u8 {
        let pages: Vec<_> = (0..100).map(|page| (page, [round ^ page as u8; PAGE_SIZE])).collect();
        let mut checkpoint = writer.begin(&blocks).unwrap();
        checkpoint.pages(BlockId(0), pages.iter().map(|(page, content)| (PageNo(*page), content))).unwrap();
        let devices = [b"QEVM\0\0\0\x03".as_slice(), &[4, round], &[0]].concat();
        checkpoint.commit(&json!({"name": "web"}), &json!({"pause_us": 900}), &devices).unwrap();
    }
    writer.settle().unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn listing_verifying_and_compacting() {
    let directory = tempfile::tempdir().unwrap();
    let path = sample(&directory.path().join("web"));
    let text = text_of(&store(["ls", &path], 0));
    for word in
        ["VM web (00000000-0000-0000-0000-000000000007)", "owner epoch 1: `protect web`", "times the RAM of", "UTC"]
    {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    let listing = json_of(&store(["--json", "ls", &path], 0));
    let numbers: Vec<_> =
        listing["checkpoints"].as_array().unwrap().iter().map(|checkpoint| checkpoint["number"].as_u64()).collect();
    assert_eq!(numbers, [Some(1), Some(2), Some(3)]);
    assert_eq!(listing["checkpoints"][0]["info"]["pages"]["stored"], 99);
    let text = text_of(&store(["verify", &path], 0));
    assert!(text.contains("3 checkpoints") && text.contains("all good"), "{text}");
    let text = text_of(&store(["compact", &path], 0));
    assert!(text.contains("freed"), "{text}");
    let verified = json_of(&store(["--json", "verify", &path], 0));
    assert_eq!(verified["bad"], json!([]));

    // Damage one byte of a page.
    let segments: Vec<PathBuf> =
        fs::read_dir(directory.path().join("web/segments")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let longest = segments.iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = fs::read(longest).unwrap();
    let at = bytes.len() - 5;
    bytes[at] ^= 0x10;
    fs::write(longest, bytes).unwrap();
    let text = text_of(&store(["verify", &path], 1));
    for word in ["bad:", "VM web, checkpoint", "block pc.ram, page", "1 bad"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}

#[test]
fn invalid_arguments_have_exit_status_2_and_failures_1() {
    let directory = tempfile::tempdir().unwrap();
    let path = sample(&directory.path().join("web"));
    for (arguments, word) in [
        (&["ls", "http://host/web"][..], "`http://` is not known"),
        (&["ls", "tls://host:7001/web"], "mount the directory of the store"),
        (&["ls"], "<STORE>"),
        (&["--json", "export", &path], "--output"),
        (&["import", "/nowhere/store", "/dev/null", "--create-store"], "--name"),
        (&["import", &path, "/dev/null", "--keep", "0"], "keep"),
    ] {
        let text = text_of(&store(arguments, 2));
        assert!(text.contains(word), "{arguments:?}: {word} is not in {text}");
    }
    for (arguments, word) in [
        (&["ls", "/nowhere/at/all"][..], "not a store"),
        (&["import", "/nowhere/store", "/dev/null"], "not a store"),
        (&["import", "/nowhere/store", "/dev/null", "--name", "db"], "rekindle store init /nowhere/store"),
        (&["export", &path, "--at", "9"], "available: 1, 2, 3"),
        (&["import", &path, "/dev/null"], "cut short"),
        (
            &["import", &path, "/dev/null", "--name", "db", "--uuid", "00000000-0000-0000-0000-000000000009"],
            "holds VM web",
        ),
    ] {
        let text = text_of(&store(arguments, 1));
        assert!(text.contains(word), "{arguments:?}: {word} is not in {text}");
    }
    let report = json_of(&store(["--json", "ls", "/nowhere/at/all"], 1));
    assert_eq!((&report["exit_status"], &report["kind"]), (&1.into(), &"not-a-store".into()));
    // The failed import has claimed the store, and changed nothing else.
    assert_eq!(json_of(&store(["--json", "ls", &path], 0))["checkpoints"].as_array().unwrap().len(), 3);
}

#[test]
fn an_exported_checkpoint_can_be_imported() {
    let directory = tempfile::tempdir().unwrap();
    let path = sample(&directory.path().join("web"));
    let file = directory.path().join("web.stream");
    let name = file.to_str().unwrap();
    let report = json_of(&store(["--json", "export", &path, "--at", "2", "--output", name], 0));
    assert_eq!(report["checkpoint"], 2);
    assert_eq!(report["bytes"], fs::metadata(&file).unwrap().len());
    let piped = command(["export", &path, "--at", "2"]).stderr(Stdio::null()).output().unwrap();
    assert!(piped.stdout == fs::read(&file).unwrap(), "standard output differs from the file");
    // Import from standard input into a new store.
    let other = directory.path().join("other").to_str().unwrap().to_owned();
    let mut import = command(["import", &other, "-", "--create-store", "--name", "copy"]);
    let imported = import.stdin(fs::File::open(&file).unwrap()).output().unwrap();
    assert!(imported.status.success(), "{imported:?}");
    let again = directory.path().join("again");
    store(["export", &other, "--output", again.to_str().unwrap()], 0);
    assert!(fs::read(&again).unwrap() == fs::read(&file).unwrap(), "an imported checkpoint differs from the original");
    // Imported into the store that it came from, the checkpoint is a further checkpoint of the same VM.
    let imported = json_of(&store(["--json", "import", &path, name], 0));
    assert_eq!(imported["number"], 4);
    // An export to a named pipe does not replace the pipe.
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).unwrap()
    });
    store(["export", &path, "--at", "2", "--output", pipe.to_str().unwrap()], 0);
    assert!(reader.join().unwrap() == fs::read(&file).unwrap());
    // A failed export leaves no file.
    let nowhere = directory.path().join("none/at/all");
    store(["export", &path, "--output", nowhere.to_str().unwrap()], 1);
    let text =
        text_of(&store(["export", &path, "--at", "7", "--output", directory.path().join("x").to_str().unwrap()], 1));
    assert!(text.contains("available:"), "{text}");
    assert!(!directory.path().join("x").exists() && !directory.path().join("x.part").exists());
}
