//! Processes that a loader has started, and programs that only resemble a QEMU.

use super::*;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A process that is killed on drop.
struct KilledOnDrop(Child);

impl KilledOnDrop {
    /// Starts `command`, and waits until its process runs the expected program.
    fn start(command: &mut Command, is_expected: impl Fn(&Program) -> bool) -> (Self, Program) {
        let process = Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let program = Process::of(process.0.id()).and_then(Program::of);
            if let Ok(program) = &program
                && is_expected(program)
            {
                return (process, program.clone());
            }
            assert!(Instant::now() < deadline, "{program:?}");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

fn version(major: u32) -> Version {
    Version { major, minor: 1, micro: 3 }
}

/// Makes a copy of `cat` with `text` at its end, where an ELF file may contain anything.
fn copy_cat_with(path: &Path, text: &str) {
    fs::copy(fs::canonicalize("/bin/cat").unwrap(), path).unwrap();
    fs::OpenOptions::new().append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

#[test]
fn a_program_is_a_qemu_by_its_content_and_not_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let (renamed, named) = (directory.path().join("renamed"), directory.path().join("qemu-system-x86_64"));
    // The text extends across two chunks.
    let cat_bytes = fs::metadata(fs::canonicalize("/bin/cat").unwrap()).unwrap().len() as usize;
    let filler = " ".repeat(CHUNK_BYTES - cat_bytes - 5);
    copy_cat_with(&renamed, &format!("{filler}QEMU emulator version 11.1.3 (Debian)"));
    copy_cat_with(&named, "nothing");
    let (_renamed_process, program) =
        KilledOnDrop::start(&mut Command::new(&renamed), |program| program.files == [renamed.clone()]);
    assert!(program.is_qemu(&version(11)).unwrap());
    assert!(!program.is_qemu(&version(10)).unwrap(), "the program is of another version than what answers");
    // Another file gets the program's name, as after an upgrade of the package.
    fs::remove_file(&renamed).unwrap();
    fs::write(&renamed, "").unwrap();
    let replaced = Program::of(program.process).unwrap();
    assert_eq!(replaced.start, renamed);
    assert!(replaced.is_qemu(&version(11)).unwrap());
    let (_named_process, program) =
        KilledOnDrop::start(&mut Command::new(&named), |program| program.files == [named.clone()]);
    assert!(!program.is_qemu(&version(11)).unwrap());
}

#[test]
fn a_program_under_a_loader_is_found_with_its_own_arguments_and_the_script_that_started_it() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().canonicalize().unwrap();
    let (file, script) = (directory.join("program"), directory.join("script"));
    copy_cat_with(&file, "QEMU emulator version 11.1.3");
    let loader = fs::canonicalize(LOADER).unwrap();
    let text = format!("#!/bin/sh\nexec {LOADER} --inhibit-cache --argv0 \"$0\" {} - -u \"$@\"\n", file.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let files = vec![file.clone(), loader];
    let is_expected = |program: &Program| program.files == files;

    let (_script_process, program) = KilledOnDrop::start(Command::new(&script).arg("-"), is_expected);
    assert_eq!(program.start, script);
    assert_eq!(program.arguments, ["-", "-u", "-"]);
    assert!(program.is_qemu(&version(11)).unwrap() && !program.is_qemu(&version(10)).unwrap());

    // Without the script's name: the program's file is the only one to start again. The path is relative.
    let mut command = Command::new(LOADER);
    command.args(["--inhibit-cache", "./program", "-u"]).current_dir(&directory);
    let (_loader_process, program) = KilledOnDrop::start(&mut command, is_expected);
    assert_eq!((program.start.clone(), program.arguments.clone()), (file.clone(), vec!["-u".to_owned()]));
    assert!(program.is_qemu(&version(11)).unwrap());

    // The program's file was removed.
    fs::remove_file(&file).unwrap();
    let removed = Program::of(program.process).unwrap();
    assert_eq!(removed.files, files);
    assert!(removed.is_qemu(&version(11)).unwrap());
}

#[test]
fn a_program_that_is_started_as_usual_is_not_taken_for_a_loader() {
    let parse = |line: &str| LoaderCommand::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
    assert!(parse("qemu -name x").is_none());
    assert!(parse("qemu").is_none());
    assert!(parse("ld.so --library-path").is_none());
    let cat = fs::canonicalize("/bin/cat").unwrap();
    // Just after the exec the process's command line may still be empty.
    let is_expected = |program: &Program| program.files == [cat.clone()] && !program.arguments.is_empty();
    // The first argument is a file, which is mapped, and yet the program is the one that was executed.
    let (_cat_process, program) =
        KilledOnDrop::start(Command::new(&cat).args([cat.to_str().unwrap(), "-"]), is_expected);
    assert_eq!(program.arguments, [cat.to_str().unwrap(), "-"]);
}
