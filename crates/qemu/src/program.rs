//! Which program a process runs, whether that is a QEMU, and how to start another one like it.
//!
//! `/proc/PID/exe` alone does not show it: a QEMU with its own C library is often started by that library's dynamic
//! loader (`ld.so --library-path DIR QEMU ARGUMENTS`). The kernel then reports the loader as the program.

use crate::qmp::Version;
use memchr::memmem;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Suffix that the kernel appends to the name of a file that was removed or replaced.
const DELETED_SUFFIX: &str = " (deleted)";
/// Options of glibc's dynamic loader that take a value.
const LOADER_OPTIONS_WITH_VALUE: &[&str] = &[
    "--library-path",
    "--inhibit-rpath",
    "--glibc-hwcaps-prepend",
    "--glibc-hwcaps-mask",
    "--audit",
    "--preload",
    "--argv0",
];
/// Bytes of a program that are searched at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The program that a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The program's file, and the loader's file if a loader started it. Either may have been removed or replaced
    /// since.
    pub files: Vec<PathBuf>,
    /// The file to execute to start the program again: the script that started the loader, if the loader knows its
    /// name (`--argv0`), otherwise the program's file.
    pub start: PathBuf,
    /// Arguments of the program, without those of a loader.
    pub arguments: Vec<String>,
    process: Process,
}

impl Program {
    /// Determines which program `process` runs.
    ///
    /// # Errors
    /// `PermissionDenied` for the process of another user; `NotFound` if it has ended.
    pub fn of(process: Process) -> io::Result<Self> {
        let executed = fs::read_link(format!("/proc/{}/exe", process.pid))?;
        let executed = without_deleted_suffix(&executed);
        let command_line = fs::read(format!("/proc/{}/cmdline", process.pid))?;
        let words = command_line.strip_suffix(b"\0").unwrap_or(&command_line).split(|&byte| byte == 0);
        let words: Vec<_> = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        if let Some(loader) = LoaderCommand::parse(&words) {
            let mappings = maps::of(process)?.into_iter();
            let code_mappings = mappings.filter(|mapping| mapping.executable && mapping.inode != 0);
            let code_files: Vec<_> =
                code_mappings.map(|mapping| without_deleted_suffix(Path::new(&mapping.name))).collect();
            if let Some(file) = loader.loaded_file(&code_files, process).filter(|file| *file != executed) {
                let script = loader.argv0.filter(|path| *path != executed && is_executable(path));
                let start = script.unwrap_or_else(|| file.clone());
                return Ok(Self { files: vec![file, executed], start, arguments: loader.arguments, process });
            }
        }
        let arguments = words.into_iter().skip(1).collect();
        Ok(Self { start: executed.clone(), files: vec![executed], arguments, process })
    }

    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Returns whether the program is a QEMU of `version`, which the process reported: the program must contain the
    /// text that it prints for `-version`. Its name proves nothing.
    ///
    /// # Errors
    /// When the program's file cannot be read.
    pub fn is_qemu(&self, version: &Version) -> io::Result<bool> {
        let version_text = format!("QEMU emulator version {version}");
        if contains(self.open_executed()?, version_text.as_bytes())? {
            return Ok(true);
        }
        // The last file is the executed one. If that is a loader, the program is before it.
        match self.files.as_slice() {
            [program, _loader] => contains(self.open_loaded(program)?, version_text.as_bytes()),
            _ => Ok(false),
        }
    }

    /// Opens the file that the process runs, even if it was removed or replaced since.
    ///
    /// # Errors
    /// `PermissionDenied` for the process of another user; `NotFound` if it has ended.
    pub fn open_file(&self) -> io::Result<File> {
        match self.files.as_slice() {
            [program, _loader] => self.open_loaded(program),
            _ => self.open_executed(),
        }
    }

    /// Opens the file that the kernel has executed, even if another file has its name now.
    fn open_executed(&self) -> io::Result<File> {
        File::open(format!("/proc/{}/exe", self.process.pid))
    }

    /// Opens the file that a loader has mapped, even if another file has its name now.
    fn open_loaded(&self, file: &Path) -> io::Result<File> {
        for mapping in maps::of(self.process)? {
            if mapping.executable && without_deleted_suffix(Path::new(&mapping.name)) == file {
                // Only root may open a file through its mapping.
                if let Ok(Some(opened)) = mapping.open(self.process) {
                    return Ok(opened);
                }
                break;
            }
        }
        File::open(in_root_of(self.process, file))
    }
}

/// A command line that may be a dynamic loader's: `LOADER [OPTIONS] PROGRAM [ARGUMENTS]`.
struct LoaderCommand {
    program: PathBuf,
    /// Value of the option `--argv0`.
    argv0: Option<PathBuf>,
    /// Arguments of the program.
    arguments: Vec<String>,
}

impl LoaderCommand {
    fn parse(words: &[String]) -> Option<Self> {
        let mut argv0 = None;
        let mut unread = words.iter().skip(1);
        loop {
            let word = unread.next()?;
            if !word.starts_with('-') {
                return Some(Self { program: word.into(), argv0, arguments: unread.cloned().collect() });
            }
            if !word.starts_with("--") {
                return None;
            }
            if LOADER_OPTIONS_WITH_VALUE.contains(&word.as_str()) {
                let value = unread.next()?;
                if word == "--argv0" {
                    argv0.get_or_insert_with(|| PathBuf::from(value));
                }
            }
        }
    }

    /// Returns the program's file as `process` sees it, if it is one of the files that the process maps as code.
    fn loaded_file(&self, code_files: &[PathBuf], process: Process) -> Option<PathBuf> {
        let link = |name: &str| fs::read_link(format!("/proc/{}/{name}", process.pid)).ok();
        // A removed file has only the name on the command line.
        let named: PathBuf = link("cwd").unwrap_or_default().join(&self.program).components().collect();
        // The process may have another root.
        let canonical = fs::canonicalize(in_root_of(process, &named)).ok();
        let canonical_in_root = canonical
            .zip(link("root"))
            .and_then(|(canonical, root)| Some(Path::new("/").join(canonical.strip_prefix(root).ok()?)));
        [Some(named), canonical_in_root].into_iter().flatten().find(|candidate| code_files.contains(candidate))
    }
}

/// Returns a path at which this process finds the file that `process` finds at `path`.
fn in_root_of(process: Process, path: &Path) -> PathBuf {
    Path::new(&format!("/proc/{}/root", process.pid)).join(path.strip_prefix("/").unwrap_or(path))
}

fn without_deleted_suffix(path: &Path) -> PathBuf {
    path.to_str().and_then(|path| path.strip_suffix(DELETED_SUFFIX)).map_or_else(|| path.to_owned(), PathBuf::from)
}

fn is_executable(path: &Path) -> bool {
    let is_executable = |file: fs::Metadata| file.is_file() && file.permissions().mode() & 0o111 != 0;
    path.is_absolute() && fs::metadata(path).is_ok_and(is_executable)
}

/// Returns whether the file contains `text`.
fn contains(file: File, text: &[u8]) -> io::Result<bool> {
    position_of(file, text).map(|position| position.is_some())
}

/// Returns the offset of `text` in the whole file, in bytes, wherever its read position is.
pub(crate) fn position_of(mut file: File, text: &[u8]) -> io::Result<Option<u64>> {
    let finder = memmem::Finder::new(text);
    // Keep the end of each chunk: the text may extend across two chunks.
    let mut buffer = Vec::with_capacity(CHUNK_BYTES + text.len());
    let mut buffer_offset = 0;
    file.rewind()?;
    loop {
        let searched = buffer.len().saturating_sub(text.len());
        buffer.drain(..searched);
        buffer_offset += searched as u64;
        if file.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut buffer)? == 0 {
            return Ok(None);
        }
        if let Some(position) = finder.find(&buffer) {
            return Ok(Some(buffer_offset + position as u64));
        }
    }
}

#[cfg(test)]
mod tests;
