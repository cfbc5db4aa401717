//! Which program a process runs, whether that is a QEMU, and how to start another one like it.
//!
//! `/proc/PID/exe` alone does not show it: a QEMU with its own C library is often started by that library's dynamic
//! loader (`ld.so --library-path DIR QEMU ARGUMENTS`). The kernel then reports the loader as the program.

use crate::qmp::Version;
use memchr::memmem;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Suffix that the kernel appends to the name of a file that was removed or replaced.
const DELETED: &str = " (deleted)";
/// Options of glibc's dynamic loader that take a value.
const LOADER_VALUED: &[&str] = &[
    "--library-path",
    "--inhibit-rpath",
    "--glibc-hwcaps-prepend",
    "--glibc-hwcaps-mask",
    "--audit",
    "--preload",
    "--argv0",
];
/// Bytes of a program that are searched at a time.
const CHUNK: usize = 1 << 20;

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
        let line = fs::read(format!("/proc/{}/cmdline", process.pid))?;
        let line = line.strip_suffix(b"\0").unwrap_or(&line);
        let words: Vec<_> =
            line.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let executed = without_mark(&executed);
        if let Some(loaded) = Loaded::of(&words) {
            let mapped = maps::of(process)?.into_iter().filter(|mapping| mapping.executable && mapping.inode != 0);
            let names: Vec<_> = mapped.map(|mapping| without_mark(Path::new(&mapping.name))).collect();
            if let Some(file) = loaded.among(&names, process).filter(|file| *file != executed) {
                let start = loaded
                    .argv0
                    .filter(|path| *path != executed && is_executable(path))
                    .unwrap_or_else(|| file.clone());
                return Ok(Self { files: vec![file, executed], start, arguments: loaded.arguments, process });
            }
        }
        let arguments = words.into_iter().skip(1).collect();
        Ok(Self { start: executed.clone(), files: vec![executed], arguments, process })
    }

    /// Returns whether the program is a QEMU of `version`, which the process reported: the program must contain the
    /// text that it prints for `-version`. Its name proves nothing.
    ///
    /// # Errors
    /// When the program's file cannot be read.
    pub fn is_qemu(&self, version: &Version) -> io::Result<bool> {
        let text = format!("QEMU emulator version {version}");
        for (index, file) in self.files.iter().rev().enumerate() {
            if contains(self.open(file, index == 0)?, text.as_bytes())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens a file that the process runs, even if another file has its name now.
    fn open(&self, file: &Path, is_executed: bool) -> io::Result<File> {
        if is_executed {
            return File::open(format!("/proc/{}/exe", self.process.pid));
        }
        for mapping in maps::of(self.process)? {
            if mapping.executable && without_mark(Path::new(&mapping.name)) == file {
                // Only root may open a file through its mapping.
                if let Ok(Some(opened)) = mapping.open(self.process) {
                    return Ok(opened);
                }
                break;
            }
        }
        let inside = file.strip_prefix("/").unwrap_or(file);
        File::open(Path::new(&format!("/proc/{}/root", self.process.pid)).join(inside))
    }
}

/// A command line in the form of a loader's.
struct Loaded {
    program: PathBuf,
    argv0: Option<PathBuf>,
    arguments: Vec<String>,
}

impl Loaded {
    fn of(words: &[String]) -> Option<Self> {
        let mut argv0 = None;
        let mut rest = words.iter().skip(1);
        loop {
            let word = rest.next()?;
            if !word.starts_with('-') {
                return Some(Self { program: word.into(), argv0, arguments: rest.cloned().collect() });
            }
            if !word.starts_with("--") {
                return None;
            }
            if LOADER_VALUED.contains(&word.as_str()) {
                let value = rest.next()?;
                argv0 = argv0.or_else(|| (word == "--argv0").then(|| PathBuf::from(value)));
            }
        }
    }

    /// Returns the loaded program's file, if it is one of the files that are mapped as code.
    fn among(&self, names: &[PathBuf], process: Process) -> Option<PathBuf> {
        let link = |name: &str| fs::read_link(format!("/proc/{}/{name}", process.pid)).ok();
        // File names as the process sees them: it may have another root. A removed file has only the name on the
        // command line.
        let named: PathBuf = link("cwd").unwrap_or_default().join(&self.program).components().collect();
        let inside = named.strip_prefix("/").unwrap_or(&named);
        let found = fs::canonicalize(Path::new(&format!("/proc/{}/root", process.pid)).join(inside));
        let found = found
            .ok()
            .zip(link("root"))
            .and_then(|(found, root)| Some(Path::new("/").join(found.strip_prefix(root).ok()?)));
        [Some(named), found].into_iter().flatten().find(|candidate| names.contains(candidate))
    }
}

fn without_mark(path: &Path) -> PathBuf {
    path.to_str().and_then(|path| path.strip_suffix(DELETED)).map_or_else(|| path.to_owned(), PathBuf::from)
}

fn is_executable(path: &Path) -> bool {
    let may_run = |found: fs::Metadata| found.is_file() && found.permissions().mode() & 0o111 != 0;
    path.is_absolute() && fs::metadata(path).is_ok_and(may_run)
}

/// Returns whether the file contains `text`.
fn contains(mut file: File, text: &[u8]) -> io::Result<bool> {
    let finder = memmem::Finder::new(text);
    // Keep the end of each part: the text may extend across two parts.
    let mut buffer = Vec::with_capacity(CHUNK + text.len());
    loop {
        let kept = buffer.len().saturating_sub(text.len());
        buffer.drain(..kept);
        if file.by_ref().take(CHUNK as u64).read_to_end(&mut buffer)? == 0 {
            return Ok(false);
        }
        if finder.find(&buffer).is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests;
