//! The pages of another process's private memory.

use crate::inject::{Call, InjectError, Injector};
use std::ops::Range;

/// Makes a process drop the pages at `ranges` (addresses) of its private memory, which are zero afterwards. An empty range
/// has no effect. Can be repeated.
///
/// # Errors
/// As for [`Injector::run`]. Some of the ranges may have been dropped.
pub fn drop_pages(injector: Injector, ranges: &[Range<u64>]) -> Result<(), InjectError> {
    let drop = |range: &Range<u64>| {
        let arguments = [range.start, range.end - range.start, libc::MADV_DONTNEED as u64];
        Call::new("madvise", libc::SYS_madvise, arguments)
    };
    injector.run(|thread| ranges.iter().try_for_each(|range| thread.call(drop(range)).map(std::mem::drop)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, PageMap};
    use crate::process::Process;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    #[test]
    fn a_frozen_process_drops_the_chosen_pages_and_stays_frozen() {
        const PAGE: u64 = 4096;
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(b"started\n").unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let process = Process::of(child.id()).unwrap();
        let injector = Injector::new(process).unwrap();
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let arguments = [0, 8 * PAGE, protection as u64, flags as u64, u64::MAX, 0];
        let start = injector.call(Call::new("mmap", libc::SYS_mmap, arguments)).unwrap();
        memory::write(process, start, &[7; 8 * PAGE as usize]).unwrap();
        assert!(process.stop_fully(Duration::from_secs(10)).unwrap());

        drop_pages(injector, &[start + PAGE..start + 3 * PAGE, start + 6 * PAGE..start + 7 * PAGE]).unwrap();
        assert!(process.is_stopped());
        let populated = PageMap::open(process).unwrap().populated(start, 8 * PAGE).unwrap();
        assert_eq!(populated.to_vec(), [0..PAGE, 3 * PAGE..6 * PAGE, 7 * PAGE..8 * PAGE]);
        // Nothing is dropped by an empty range.
        drop_pages(injector, std::slice::from_ref(&(start..start))).unwrap();
        let mut content = [0; PAGE as usize];
        memory::read(process, start, &mut content).unwrap();
        assert_eq!(content, [7; PAGE as usize]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
