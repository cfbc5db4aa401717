//! Cached answers of a QEMU binary: starting a QEMU only to query it can take as long as a whole restore.
//!
//! Each binary has one file. The file also records everything that the answers depend on: the program, each library
//! and module that the queried QEMU had mapped, the directories of these (a module may be added), and the variables
//! that select libraries and modules. The answers are used only while all of that is unchanged. In every doubtful
//! case the QEMU is queried again: the file cannot be read or has another checksum, the program is a script that
//! starts another program, or a change is so fresh that a later one might not show.
//!
//! A cached answer is never the reason to *reject* something: a caller that finds a feature missing queries the QEMU
//! itself ([`Binary::asked_again`]). A cached answer that wrongly allows something makes QEMU fail to start.

use super::{Binary, BinaryError};
use crate::mark::Mark;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_64;

/// Version of the file's format.
const FORMAT: u32 = 2;
/// A file that changed within this time may change again without a new time stamp: the clocks of some file systems
/// are as coarse as 2 s.
const FRESH_NS: i128 = 2_000_000_000;

/// The content of the cache file of one binary.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    format: u32,
    /// Version of the Rekindle that queried: another version may query more.
    asked_by: String,
    circumstances: Circumstances,
    binary: Binary,
}

/// Everything that the answers depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Circumstances {
    /// Variables that select libraries and modules, sorted.
    variables: Vec<(String, String)>,
    /// The program is the first entry.
    files: Vec<Mark>,
}

/// Returns the variables with which the same program may behave as another QEMU.
fn variables() -> Vec<(String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let all = env::vars_os().map(|(name, value)| (text(name), text(value)));
    let mut some: Vec<_> = all.filter(|(name, _)| name.starts_with("LD_") || name.starts_with("QEMU_")).collect();
    some.sort();
    some
}

/// Returns the file that `path` starts: a name without a slash is looked up in `PATH`, as by a shell.
fn resolved(path: &Path) -> Option<PathBuf> {
    if path.components().count() != 1 || path.is_absolute() {
        return std::path::absolute(path).ok();
    }
    let runs = |path: &PathBuf| {
        let mode = fs::metadata(path).map(|found| std::os::unix::fs::PermissionsExt::mode(&found.permissions()));
        mode.is_ok_and(|mode| mode & 0o111 != 0) && path.is_file()
    };
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(path)).find(runs)
}

/// A query, and the files that the queried QEMU depended on.
pub(super) struct Asked {
    program: Option<Mark>,
    began_ns: i128,
    circumstances: Option<Circumstances>,
}

impl Asked {
    /// Records the program before `path` is started.
    pub(super) fn before(path: &Path) -> Self {
        let program = resolved(path).and_then(|path| Mark::of(&path).ok());
        Self { program, began_ns: now_ns(), circumstances: None }
    }

    /// Records the mapped files after the QEMU has answered, while it still runs.
    pub(super) fn answered(&mut self, process: io::Result<Process>) {
        self.circumstances = process.ok().and_then(|process| self.circumstances_of(process));
    }

    fn circumstances_of(&self, process: Process) -> Option<Circumstances> {
        let program = self.program.clone()?;
        // A script that starts the real program: it may start another one the next time.
        let runs = Mark::of(Path::new(&format!("/proc/{}/exe", process.pid))).ok()?;
        if !runs.is_file_of(&program) {
            return None;
        }
        let mut names = BTreeSet::new();
        for mapping in maps::of(process).ok()?.into_iter().filter(|mapping| mapping.executable && mapping.inode != 0) {
            let path = PathBuf::from(mapping.name);
            names.extend(path.parent().map(Path::to_owned));
            names.insert(path);
        }
        names.remove(&program.path);
        let others = names.iter().map(|path| Mark::of(path));
        let files: Vec<_> = std::iter::once(Ok(program)).chain(others).collect::<io::Result<_>>().ok()?;
        let settled = files.iter().all(|mark| mark.changed_ns() < self.began_ns - FRESH_NS);
        settled.then(|| Circumstances { variables: variables(), files })
    }
}

fn now_ns() -> i128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i128::try_from(since.as_nanos()).unwrap_or(i128::MAX)
}

impl Binary {
    /// Returns the features of the QEMU at `path`: the answers cached in `directory` if they are still valid;
    /// otherwise it queries the QEMU and caches the answers.
    ///
    /// # Errors
    /// As [`Binary::probe`]. A failure to write the cache is only logged.
    pub fn known(path: &Path, directory: &Path) -> Result<Self, BinaryError> {
        match read(path, directory) {
            Some(binary) => Ok(binary),
            None => Self::ask_and_keep(path, directory),
        }
    }

    /// Queries the QEMU again if these are cached answers: call this before something is rejected because of them.
    ///
    /// # Errors
    /// As [`Binary::probe`].
    pub fn asked_again(self, directory: &Path) -> Result<Self, BinaryError> {
        if self.kept { Self::ask_and_keep(&self.path, directory) } else { Ok(self) }
    }

    fn ask_and_keep(path: &Path, directory: &Path) -> Result<Self, BinaryError> {
        let (binary, asked) = Self::ask_at(path)?;
        if let Some(circumstances) = asked.circumstances {
            let kept = Kept { format: FORMAT, asked_by: version(), circumstances, binary: binary.clone() };
            if let Err(e) = write(path, directory, &kept) {
                tracing::debug!("the answers of {} are not kept in {}: {e}", path.display(), directory.display());
            }
        }
        Ok(binary)
    }
}

fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Returns the cache file of the binary that is called `path`.
fn file(path: &Path, directory: &Path) -> PathBuf {
    directory.join(format!("{:016x}.json", xxh3_64(path.as_os_str().as_bytes())))
}

/// Returns the cached answers of `path`, if nothing that they depend on has changed.
fn read(path: &Path, directory: &Path) -> Option<Binary> {
    let text = fs::read(file(path, directory)).ok()?;
    let (sum, json) = text.split_at_checked(17)?;
    if sum != format!("{:016x}\n", xxh3_64(json)).as_bytes() {
        return None;
    }
    let kept: Kept = serde_json::from_slice(json).ok()?;
    let Circumstances { variables: then, files } = kept.circumstances;
    let is_as_it_was = kept.format == FORMAT
        && kept.asked_by == version()
        && kept.binary.path == path
        && then == variables()
        && files.first().map(|program| &program.path) == resolved(path).as_ref()
        && files.iter().all(Mark::holds);
    is_as_it_was.then_some(Binary { kept: true, ..kept.binary })
}

/// Writes the cache file atomically: a concurrent reader finds the previous file or the new one, complete.
fn write(path: &Path, directory: &Path, kept: &Kept) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let json = serde_json::to_vec(kept)?;
    let file = file(path, directory);
    let new = file.with_extension(format!("{}.new", std::process::id()));
    let open = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new);
    let written = open.and_then(|mut out| {
        out.write_all(format!("{:016x}\n", xxh3_64(&json)).as_bytes())?;
        out.write_all(&json)
    });
    // Not synced: after a crash an incomplete file has another checksum.
    let done = written.and_then(|()| fs::rename(&new, &file));
    if done.is_err() {
        let _ = fs::remove_file(&new);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::Version;
    use crate::syntax::Syntax;

    fn binary(path: &Path) -> Binary {
        Binary {
            path: path.to_owned(),
            version: Version { major: 10, minor: 0, micro: 2 },
            machines: BTreeSet::from(["q35".to_owned()]),
            aliases: vec![("q35".into(), "pc-q35-10.0".into())],
            cpus: BTreeSet::new(),
            devices: BTreeSet::new(),
            commands: BTreeSet::new(),
            syntax: Syntax::default(),
            kept: false,
        }
    }

    /// A directory with a program, a library, and the cached answers.
    struct Scratch {
        directory: tempfile::TempDir,
    }

    impl Scratch {
        fn new() -> Self {
            let scratch = Self { directory: tempfile::tempdir().unwrap() };
            fs::write(scratch.program(), "program").unwrap();
            fs::write(scratch.library(), "library").unwrap();
            scratch.keep(scratch.kept());
            scratch
        }

        fn program(&self) -> PathBuf {
            self.directory.path().join("qemu")
        }

        fn library(&self) -> PathBuf {
            self.directory.path().join("library")
        }

        fn answers(&self) -> PathBuf {
            self.directory.path().join("answers")
        }

        fn kept(&self) -> Kept {
            let files = [self.program(), self.library()].map(|path| Mark::of(&path).unwrap()).to_vec();
            let circumstances = Circumstances { variables: variables(), files };
            Kept { format: FORMAT, asked_by: version(), circumstances, binary: binary(&self.program()) }
        }

        fn keep(&self, kept: Kept) {
            write(&self.program(), &self.answers(), &kept).unwrap();
        }

        fn read(&self) -> Option<Binary> {
            read(&self.program(), &self.answers())
        }
    }

    #[test]
    fn what_is_kept_is_found_while_all_is_as_it_was() {
        let scratch = Scratch::new();
        let found = scratch.read().unwrap();
        assert!(found.kept);
        assert_eq!(Binary { kept: false, ..found }, binary(&scratch.program()));
        fs::write(scratch.library(), "newer library").unwrap();
        assert!(scratch.read().is_none(), "a library has changed");
        scratch.keep(scratch.kept());
        assert!(scratch.read().is_some());
        fs::write(scratch.directory.path().join("other"), "program").unwrap();
        fs::rename(scratch.directory.path().join("other"), scratch.program()).unwrap();
        assert!(scratch.read().is_none(), "another program under its name");
        fs::remove_file(scratch.program()).unwrap();
        assert!(scratch.read().is_none(), "no program under its name");
    }

    #[test]
    fn of_another_rekindle_with_other_variables_or_for_another_name_is_not_used() {
        let scratch = Scratch::new();
        scratch.keep(Kept { asked_by: "0.0.1".into(), ..scratch.kept() });
        assert!(scratch.read().is_none());
        scratch.keep(Kept { format: FORMAT + 1, ..scratch.kept() });
        assert!(scratch.read().is_none());
        let mut kept = scratch.kept();
        kept.circumstances.variables.push(("LD_PRELOAD".into(), "x.so".into()));
        scratch.keep(kept);
        assert!(scratch.read().is_none());
        scratch.keep(Kept { binary: binary(&scratch.library()), ..scratch.kept() });
        assert!(scratch.read().is_none());
    }

    #[test]
    fn every_flipped_bit_and_every_part_of_the_file_is_no_answer() {
        let scratch = Scratch::new();
        let path = file(&scratch.program(), &scratch.answers());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 0x10;
            fs::write(&path, &bad).unwrap();
            assert!(scratch.read().is_none(), "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert!(scratch.read().is_none(), "{at} bytes");
        }
        fs::write(&path, &whole).unwrap();
        assert!(scratch.read().is_some());
    }

    #[test]
    fn concurrent_writers_leave_one_complete_file() {
        let scratch = Scratch::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _ = write(&scratch.program(), &scratch.answers(), &scratch.kept());
                        if let Some(found) = scratch.read() {
                            assert_eq!(found.aliases, binary(&scratch.program()).aliases);
                        }
                    }
                });
            }
        });
        scratch.keep(scratch.kept());
        assert!(scratch.read().is_some());
        assert_eq!(fs::read_dir(scratch.answers()).unwrap().count(), 1, "nothing but the answers is left");
    }

    #[test]
    fn a_script_is_not_relied_on() {
        let me = Process::current().unwrap();
        let script = tempfile::NamedTempFile::new().unwrap();
        let mut asked = Asked::before(script.path());
        asked.answered(Ok(me));
        assert!(asked.circumstances.is_none());
        let exe = env::current_exe().unwrap();
        // As if the test's own program had not changed for a long time.
        let mut asked = Asked { began_ns: i128::MAX, ..Asked::before(&exe) };
        asked.answered(Ok(me));
        let found = asked.circumstances.unwrap();
        assert_eq!(found.files[0], Mark::of(&exe).unwrap());
        assert!(found.files.iter().any(|mark| mark.path.to_string_lossy().contains("libc.so")), "{found:?}");
        let mut asked = Asked { began_ns: 0, ..Asked::before(&exe) };
        asked.answered(Ok(me));
        assert!(asked.circumstances.is_none(), "what has just been changed is not relied on");
    }
}
