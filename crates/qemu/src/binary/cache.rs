//! Cached answers of a QEMU binary: starting a QEMU only to query it can take as long as a whole restore.
//!
//! Each binary has one file. The file also records everything that the answers depend on: the program, each library
//! and module that the queried QEMU had mapped, the directories of these (a module may be added), and the variables
//! that select libraries and modules. The answers are used only while all of that is unchanged. In every doubtful
//! case the QEMU is queried again: the file cannot be read or has another checksum, the program is a script that
//! starts another program, or a change is so fresh that a later one might not show.
//!
//! A cached answer is never the reason to *reject* something: a caller that finds a feature missing queries the QEMU
//! itself ([`Binary::probe_again`]). A cached answer that wrongly allows something makes QEMU fail to start.

use super::{Binary, BinaryError};
use crate::file_identity::FileIdentity;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_64;

/// Version of the file's format.
const FORMAT_VERSION: u32 = 3;
/// A file that changed within this time may change again without a new time stamp: the clocks of some file systems
/// are as coarse as 2 s.
const FRESH_NS: i128 = 2_000_000_000;
/// Length of the checksum line at the start of the file: 16 hexadecimal digits and a line end.
const CHECKSUM_BYTES: usize = 17;

/// The content of the cache file of one binary.
#[derive(Debug, Serialize, Deserialize)]
struct CacheEntry {
    format: u32,
    /// Version of the Rekindle that queried: another version may query more.
    #[serde(rename = "asked_by")]
    rekindle_version: String,
    #[serde(rename = "circumstances")]
    dependencies: Dependencies,
    binary: Binary,
}

/// Everything that the answers depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Dependencies {
    /// Variables that select libraries and modules, sorted.
    variables: Vec<(String, String)>,
    /// The program is the first entry.
    files: Vec<FileIdentity>,
}

impl Binary {
    /// Returns the features of the QEMU at `path`: the answers cached in `directory` if they are still valid;
    /// otherwise it queries the QEMU and caches the answers.
    ///
    /// # Errors
    /// As [`Binary::probe`]. A failure to write the cache is only logged.
    pub fn probe_cached(path: &Path, directory: &Path) -> Result<Self, BinaryError> {
        match read(path, directory) {
            Some(binary) => Ok(binary),
            None => Self::probe_and_cache(path, directory),
        }
    }

    /// Queries the QEMU again if these are cached answers: call this before something is rejected because of them.
    ///
    /// # Errors
    /// As [`Binary::probe`].
    pub fn probe_again(self, directory: &Path) -> Result<Self, BinaryError> {
        if self.is_cached { Self::probe_and_cache(&self.path, directory) } else { Ok(self) }
    }

    fn probe_and_cache(path: &Path, directory: &Path) -> Result<Self, BinaryError> {
        let (binary, dependencies) = Self::probe_with_dependencies(path)?;
        if let Some(dependencies) = dependencies.complete() {
            let rekindle_version = own_version();
            let entry = CacheEntry { format: FORMAT_VERSION, rekindle_version, dependencies, binary: binary.clone() };
            if let Err(e) = write(path, directory, &entry) {
                tracing::debug!("the answers of {} are not kept in {}: {e}", path.display(), directory.display());
            }
        }
        Ok(binary)
    }
}

/// Records what the answers depend on while a QEMU is queried.
pub(super) struct DependencyRecorder {
    program: Option<FileIdentity>,
    began_ns: i128,
    dependencies: Option<Dependencies>,
}

impl DependencyRecorder {
    /// Records the program before `path` is started.
    pub(super) fn begin(path: &Path) -> Self {
        let program = program_file(path).and_then(|path| FileIdentity::of(&path).ok());
        Self { program, began_ns: now_ns(), dependencies: None }
    }

    /// Records the mapped files after the QEMU has answered, while it still runs.
    pub(super) fn record(&mut self, process: io::Result<Process>) {
        self.dependencies = process.ok().and_then(|process| self.dependencies_of(process));
    }

    /// Returns the dependencies; `None` if they are not certain.
    fn complete(self) -> Option<Dependencies> {
        self.dependencies
    }

    fn dependencies_of(&self, process: Process) -> Option<Dependencies> {
        let program = self.program.clone()?;
        // A script that starts the real program: it may start another one the next time.
        let executed = FileIdentity::of(Path::new(&format!("/proc/{}/exe", process.pid))).ok()?;
        if !executed.is_same_file(&program) {
            return None;
        }
        let mut paths = BTreeSet::new();
        for mapping in maps::of(process).ok()?.into_iter().filter(|mapping| mapping.executable && mapping.inode != 0) {
            let path = PathBuf::from(mapping.name);
            paths.extend(path.parent().map(Path::to_owned));
            paths.insert(path);
        }
        paths.remove(&program.path);
        let mut files = vec![program];
        for path in &paths {
            files.push(FileIdentity::of(path).ok()?);
        }
        let are_old = files.iter().all(|file| file.changed_ns() < self.began_ns - FRESH_NS);
        are_old.then(|| Dependencies { variables: variables(), files })
    }
}

/// Returns the file that `path` starts: a name without a slash is looked up in `PATH`, as by a shell.
pub(crate) fn program_file(path: &Path) -> Option<PathBuf> {
    if path.components().count() != 1 || path.is_absolute() {
        return std::path::absolute(path).ok();
    }
    let is_executable = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(path)).find(is_executable)
}

/// Returns the variables with which the same program may behave as another QEMU.
fn variables() -> Vec<(String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let all = env::vars_os().map(|(name, value)| (text(name), text(value)));
    let mut relevant: Vec<_> = all.filter(|(name, _)| name.starts_with("LD_") || name.starts_with("QEMU_")).collect();
    relevant.sort();
    relevant
}

fn now_ns() -> i128 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i128::try_from(since_1970.as_nanos()).unwrap_or(i128::MAX)
}

fn own_version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Returns the cache file of the binary that is called `path`.
fn cache_file(path: &Path, directory: &Path) -> PathBuf {
    directory.join(format!("{:016x}.json", xxh3_64(path.as_os_str().as_bytes())))
}

fn checksum_line(json: &[u8]) -> String {
    format!("{:016x}\n", xxh3_64(json))
}

/// Returns the cached answers of `path`, if nothing that they depend on has changed.
fn read(path: &Path, directory: &Path) -> Option<Binary> {
    let content = fs::read(cache_file(path, directory)).ok()?;
    let (checksum, json) = content.split_at_checked(CHECKSUM_BYTES)?;
    if checksum != checksum_line(json).as_bytes() {
        return None;
    }
    let entry: CacheEntry = serde_json::from_slice(json).ok()?;
    let Dependencies { variables: recorded_variables, files } = entry.dependencies;
    let is_valid = entry.format == FORMAT_VERSION
        && entry.rekindle_version == own_version()
        && entry.binary.path == path
        && recorded_variables == variables()
        && files.first().map(|program| &program.path) == program_file(path).as_ref()
        && files.iter().all(FileIdentity::is_unchanged);
    is_valid.then_some(Binary { is_cached: true, ..entry.binary })
}

/// Writes the cache file atomically: a concurrent reader finds the previous file or the new one, complete.
fn write(path: &Path, directory: &Path, entry: &CacheEntry) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let json = serde_json::to_vec(entry)?;
    let file = cache_file(path, directory);
    let new_file = file.with_extension(format!("{}.new", std::process::id()));
    let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new_file);
    let written = opened.and_then(|mut out| {
        out.write_all(checksum_line(&json).as_bytes())?;
        out.write_all(&json)
    });
    // Not synced: after a crash an incomplete file has another checksum.
    let renamed = written.and_then(|()| fs::rename(&new_file, &file));
    if renamed.is_err() {
        let _ = fs::remove_file(&new_file);
    }
    renamed
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
            is_cached: false,
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
            scratch.write(scratch.entry());
            scratch
        }

        fn program(&self) -> PathBuf {
            self.directory.path().join("qemu")
        }

        fn library(&self) -> PathBuf {
            self.directory.path().join("library")
        }

        fn cache(&self) -> PathBuf {
            self.directory.path().join("answers")
        }

        fn entry(&self) -> CacheEntry {
            let files = [self.program(), self.library()].map(|path| FileIdentity::of(&path).unwrap()).to_vec();
            CacheEntry {
                format: FORMAT_VERSION,
                rekindle_version: own_version(),
                dependencies: Dependencies { variables: variables(), files },
                binary: binary(&self.program()),
            }
        }

        fn write(&self, entry: CacheEntry) {
            write(&self.program(), &self.cache(), &entry).unwrap();
        }

        fn read(&self) -> Option<Binary> {
            read(&self.program(), &self.cache())
        }
    }

    #[test]
    fn an_entry_is_used_while_its_dependencies_are_unchanged() {
        let scratch = Scratch::new();
        let cached = scratch.read().unwrap();
        assert!(cached.is_cached);
        assert_eq!(Binary { is_cached: false, ..cached }, binary(&scratch.program()));
        fs::write(scratch.library(), "newer library").unwrap();
        assert!(scratch.read().is_none(), "a library has changed");
        scratch.write(scratch.entry());
        assert!(scratch.read().is_some());
        fs::write(scratch.directory.path().join("other"), "program").unwrap();
        fs::rename(scratch.directory.path().join("other"), scratch.program()).unwrap();
        assert!(scratch.read().is_none(), "another program under its name");
        fs::remove_file(scratch.program()).unwrap();
        assert!(scratch.read().is_none(), "no program under its name");
    }

    #[test]
    fn an_entry_of_another_rekindle_with_other_variables_or_for_another_name_is_not_used() {
        let scratch = Scratch::new();
        scratch.write(CacheEntry { rekindle_version: "0.0.1".into(), ..scratch.entry() });
        assert!(scratch.read().is_none());
        scratch.write(CacheEntry { format: FORMAT_VERSION + 1, ..scratch.entry() });
        assert!(scratch.read().is_none());
        let mut entry = scratch.entry();
        entry.dependencies.variables.push(("LD_PRELOAD".into(), "x.so".into()));
        scratch.write(entry);
        assert!(scratch.read().is_none());
        scratch.write(CacheEntry { binary: binary(&scratch.library()), ..scratch.entry() });
        assert!(scratch.read().is_none());
    }

    #[test]
    fn a_file_with_a_flipped_bit_or_cut_short_is_not_used() {
        let scratch = Scratch::new();
        let path = cache_file(&scratch.program(), &scratch.cache());
        let content = fs::read(&path).unwrap();
        for position in 0..content.len() {
            let mut damaged = content.clone();
            damaged[position] ^= 0x10;
            fs::write(&path, &damaged).unwrap();
            assert!(scratch.read().is_none(), "byte {position}");
            fs::write(&path, &content[..position]).unwrap();
            assert!(scratch.read().is_none(), "{position} bytes");
        }
        fs::write(&path, &content).unwrap();
        assert!(scratch.read().is_some());
    }

    #[test]
    fn concurrent_writers_leave_one_complete_file() {
        let scratch = Scratch::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _ = write(&scratch.program(), &scratch.cache(), &scratch.entry());
                        if let Some(cached) = scratch.read() {
                            assert_eq!(cached.aliases, binary(&scratch.program()).aliases);
                        }
                    }
                });
            }
        });
        scratch.write(scratch.entry());
        assert!(scratch.read().is_some());
        assert_eq!(fs::read_dir(scratch.cache()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_script_and_a_fresh_file_are_not_relied_on() {
        let own_process = Process::current().unwrap();
        let dependencies = |mut recorder: DependencyRecorder| {
            recorder.record(Ok(own_process));
            recorder.complete()
        };
        let script = tempfile::NamedTempFile::new().unwrap();
        assert!(dependencies(DependencyRecorder::begin(script.path())).is_none());
        let exe = env::current_exe().unwrap();
        // As if the test's own program had not changed for a long time.
        let old = DependencyRecorder { began_ns: i128::MAX, ..DependencyRecorder::begin(&exe) };
        let files = dependencies(old).unwrap().files;
        assert_eq!(files[0], FileIdentity::of(&exe).unwrap());
        assert!(files.iter().any(|file| file.path.to_string_lossy().contains("libc.so")), "{files:?}");
        let fresh = DependencyRecorder { began_ns: 0, ..DependencyRecorder::begin(&exe) };
        assert!(dependencies(fresh).is_none());
    }
}
