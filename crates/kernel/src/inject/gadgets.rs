//! The instructions in a process through which its threads make injected calls: `syscall; ret`, and the C library's
//! `mov $SYS_rt_sigreturn, %rax; syscall` (`__restore_rt`), through which every signal handler returns.

use super::InjectError;
use crate::maps::{self, Mapping};
use crate::memory;
use crate::process::Process;
use std::fs;
use std::io;
use std::path::Path;

const CALL_AND_RETURN: &[u8] = &[0x0f, 0x05, 0xc3];
const RESTORER: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// Bytes of code that are read and searched at a time.
const CHUNK_BYTES: usize = 64 << 10;
/// Total bytes of code that are searched. The C library has less than 2 MiB and both sequences in its first third.
const MAX_SEARCHED_BYTES: u64 = 64 << 20;

/// Addresses of the instructions. They are in files that a process cannot unload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gadgets {
    /// `syscall; ret`.
    pub(super) call_and_return: u64,
    /// `mov $SYS_rt_sigreturn, %rax; syscall`.
    pub(super) restorer: u64,
}

/// Finds the instructions in the vDSO, the C library or the program of `process`.
///
/// # Errors
/// [`InjectError::Gone`], [`InjectError::Forbidden`], [`InjectError::Unfit`].
pub(super) fn find(process: Process) -> Result<Gadgets, InjectError> {
    let pid = process.pid;
    let failed = |what| {
        move |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => InjectError::Gone { pid },
            io::ErrorKind::PermissionDenied => InjectError::Forbidden { pid, source },
            _ if source.raw_os_error() == Some(libc::ESRCH) => InjectError::Gone { pid },
            _ => InjectError::Trace { pid, what, source },
        }
    };
    if super::thread::has_shadow_stack(process).map_err(failed("read its status"))? {
        return Err(InjectError::Unfit {
            pid,
            why: "it has shadow stacks, with which it cannot return to another place",
        });
    }
    let mut maps = maps::of(process).map_err(failed("read its memory map"))?;
    let program = fs::read_link(format!("/proc/{pid}/exe")).map_err(failed("read the name of its program"))?;
    maps.retain(|map| map.executable && !map.writable && preference(map, &program).is_some());
    maps.sort_by_key(|map| preference(map, &program));
    let mut search = Search::default();
    for map in maps {
        search.continue_in(process, &map).map_err(failed("read its code"))?;
        if let (Some(call_and_return), Some(restorer)) = (search.call_and_return, search.restorer) {
            return Ok(Gadgets { call_and_return, restorer });
        }
    }
    let why = match search.call_and_return {
        None => "neither its vDSO nor its C library has the instructions `syscall; ret`",
        Some(_) => "its C library does not have the instructions that end a signal handler (`__restore_rt`)",
    };
    Err(InjectError::Unfit { pid, why })
}

/// Returns the place of a mapping among those to be searched, or `None` if it is not to be searched: the process may
/// unload a library or code that it has generated.
fn preference(map: &Mapping, program: &Path) -> Option<u32> {
    let path = Path::new(&map.name);
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_c_library = ["libc.", "libc-", "ld-"].iter().any(|prefix| file.starts_with(prefix));
    match () {
        () if map.name == "[vdso]" => Some(0),
        () if is_c_library && map.inode != 0 => Some(1),
        () if path == program => Some(2),
        () => None,
    }
}

/// A search through several mappings.
#[derive(Default)]
struct Search {
    call_and_return: Option<u64>,
    restorer: Option<u64>,
    searched_bytes: u64,
}

impl Search {
    /// Searches `map` until both sequences are found.
    fn continue_in(&mut self, process: Process, map: &Mapping) -> io::Result<()> {
        for start in map.range.clone().step_by(CHUNK_BYTES) {
            let is_complete = self.call_and_return.is_some() && self.restorer.is_some();
            if is_complete || self.searched_bytes >= MAX_SEARCHED_BYTES {
                break;
            }
            // Consecutive chunks overlap, so that a sequence across their border is found.
            let chunk_bytes = (map.range.end - start).min((CHUNK_BYTES + RESTORER.len() - 1) as u64);
            let mut code = vec![0; chunk_bytes as usize];
            memory::read(process, start, &mut code)?;
            self.searched_bytes += chunk_bytes;
            let address_of = |sequence: &[u8]| {
                let offset = code.windows(sequence.len()).position(|instructions| instructions == sequence)?;
                Some(start + offset as u64)
            };
            self.call_and_return = self.call_and_return.or_else(|| address_of(CALL_AND_RETURN));
            self.restorer = self.restorer.or_else(|| address_of(RESTORER));
        }
        Ok(())
    }
}
