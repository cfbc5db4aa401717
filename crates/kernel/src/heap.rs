//! The heap of another process: populating it before the process needs it.

use crate::inject::{Call, Injector};
use crate::maps;
use crate::process::Process;
use std::io;
use std::ops::Range;

/// Populates all pages of a process's heap now, so that no page faults delay the process later. Needs Linux 5.14.
///
/// # Errors
/// As for [`Injector::call`].
pub fn populate(injector: Injector) -> io::Result<()> {
    let Some(heap) = heap_of(injector.process())? else { return Ok(()) };
    let arguments = [heap.start, heap.end - heap.start, libc::MADV_POPULATE_WRITE as u64];
    Ok(injector.call(Call::new("madvise", libc::SYS_madvise, arguments)).map(drop)?)
}

fn heap_of(process: Process) -> io::Result<Option<Range<u64>>> {
    Ok(maps::of(process)?.into_iter().find(|mapping| mapping.name == "[heap]").map(|mapping| mapping.range))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageMap;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    #[test]
    fn a_heap_is_populated_from_outside() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"started\n").unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let process = Process::of(child.id()).unwrap();
        let heap = heap_of(process).unwrap().unwrap();
        let populated_bytes =
            || PageMap::open(process).unwrap().populated(heap.start, heap.end - heap.start).unwrap().bytes();
        assert!(populated_bytes() < heap.end - heap.start);
        populate(Injector::new(process).unwrap()).unwrap();
        assert_eq!(populated_bytes(), heap.end - heap.start);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
