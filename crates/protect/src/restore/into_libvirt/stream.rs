//! Passes a checkpoint to the QEMU that libvirt starts, whose pages then load on demand.
//!
//! libvirt reads the start of the save image, starts QEMU, and lets QEMU read the rest from the same pipe. Meanwhile it
//! uses QEMU's monitor alone. So what another restore asks QEMU is found out without it:
//!
//! - QEMU's process: libvirt's pid file; it has the pipe open.
//! - That QEMU is complete: it has read the first bytes of its stream.
//! - Its RAM: the mapping that has its length. When libvirt has finished, QEMU's own table is compared with that
//!   ([`OnDemandRam::verify`]).
//!
//! Only then are RAM registered and the rest written. If the RAM is not found with certainty, all of it is written.

use super::image_pipe::{ImagePipe, PipeEnd, Reader};
use crate::restore::RestoreError;
use crate::restore::checkpoint::LoadInput;
use crate::restore::on_demand::OnDemandRam;
use crate::save_image::{self, SaveImageError};
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::libvirt_client::{Connection, LibvirtError};
use rekindle_kernel::process::Process;
use rekindle_libvirt::status_file::StatusFile;
use rekindle_memory::missing::Pager;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::stream::HEADER;
use rekindle_qemu::userfaultfd;
use rekindle_store::export::{ExportError, export_body};
use rekindle_vm::fault;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

/// Buffer for a stream with all memory.
const WRITE_BYTES: usize = 1 << 20;

/// A checkpoint that libvirt is to load.
pub(super) struct ImageToLoad<'a> {
    pub path: &'a Path,
    /// Name of the domain.
    pub domain: &'a str,
    pub xml: &'a str,
    /// Versioned machine type.
    pub machine: &'a str,
    pub input: &'a Arc<LoadInput>,
    /// Write all memory.
    pub eager: bool,
}

impl ImageToLoad<'_> {
    /// Lets libvirt load the image and leave the guest paused. Returns the RAM if its pages load on demand. `progress`
    /// gets the bytes of RAM written and in total, if all memory is written.
    pub(super) fn load(
        &self,
        libvirt: &Connection,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<OnDemandRam>, RestoreError> {
        let pipe = ImagePipe::create(self.path).map_err(super::path_error(self.path))?;
        thread::scope(|scope| {
            let loading = scope.spawn(|| libvirt.restore_paused(&self.path.to_string_lossy()));
            let written = self.write(&pipe, &|| loading.is_finished(), progress);
            if written.is_err() {
                pipe.end_readers(&|| loading.is_finished());
            }
            let loaded = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match (written, loaded) {
                // It knows why it has stopped reading.
                (Err(RestoreError::Journal { source, .. }), Err(e)) if source.kind() == io::ErrorKind::BrokenPipe => {
                    Err(self.failed(e))
                }
                (Ok(_), Err(e)) => Err(self.failed(e)),
                (written, _) => written,
            }
        })
    }

    fn failed(&self, source: LibvirtError) -> RestoreError {
        RestoreError::Libvirt { domain: self.domain.to_owned(), source }
    }

    /// Writes the image. `has_ended`: libvirt has finished or failed.
    fn write(
        &self,
        pipe: &ImagePipe,
        has_ended: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<OnDemandRam>, RestoreError> {
        let failed = super::path_error(self.path);
        let header = save_image::header(self.xml)?;
        let written = pipe.write_header(&header, has_ended, &|end| self.reading_qemu(end)).map_err(&failed)?;
        let Some((mut end, process)) = written else {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        };
        // When it reads them, QEMU has made all of its RAM.
        end.write_all(&HEADER).map_err(&failed)?;
        if end.wait_read().map_err(&failed)? == Reader::Closed {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        }
        let ram = if self.eager { None } else { self.register(process)? };
        fault::point("libvirt-restore.renew.registered", None, None);
        match &ram {
            Some(_) => end.write_all(&self.input.plain_stream(self.machine)?).map_err(&failed)?,
            None => {
                let mut out = BufWriter::with_capacity(WRITE_BYTES, end);
                match export_body(self.input.image()?, &mut out, Some(self.machine), progress) {
                    Err(ExportError::Write(e)) => return Err(failed(e)),
                    written => written.map_err(SaveImageError::Export)?,
                };
                out.flush().map_err(failed)?;
            }
        }
        Ok(ram)
    }

    /// Returns the process in libvirt's pid file if it has the pipe open.
    fn reading_qemu(&self, end: &PipeEnd) -> io::Result<Option<Process>> {
        let Ok(text) = fs::read_to_string(StatusFile::path_of(self.domain).with_extension("pid")) else {
            return Ok(None);
        };
        let Some(process) = text.trim().parse().ok().and_then(|pid| Process::of(pid).ok()) else { return Ok(None) };
        let pipe = end.file().metadata()?;
        let Ok(descriptors) = fs::read_dir(format!("/proc/{}/fd", process.pid)) else { return Ok(None) };
        let is_pipe = |file: fs::Metadata| (file.dev(), file.ino()) == (pipe.dev(), pipe.ino());
        let mut files = descriptors.flatten().filter_map(|entry| fs::metadata(entry.path()).ok());
        Ok(files.any(is_pipe).then_some(process))
    }

    /// Registers the RAM of a QEMU that waits for its stream. `None`: it was not found with certainty.
    fn register(&self, process: Process) -> Result<Option<OnDemandRam>, RestoreError> {
        let paged = &self.input.paged;
        let blocks = self.input.blocks.iter().filter(|block| paged.contains(&block.id));
        let lengths: Vec<_> = blocks.map(|block| (block.id.clone(), block.used)).collect();
        let Some(ram) = GuestRam::by_length(process, &lengths)? else {
            tracing::warn!("the RAM of {} is not found with certainty, so all of it is loaded first", self.domain);
            return Ok(None);
        };
        let injector = Injector::new(process)?;
        let device = userfaultfd::inject(injector).map_err(super::path_error(Path::new("/dev/userfaultfd")))?;
        let pager = Pager::register(injector, &ram, |id| paged.iter().any(|paged| paged == id), device);
        if let Some(device) = device {
            descriptor::close(injector, device)?;
        }
        Ok(Some(OnDemandRam::adopt(Arc::clone(self.input), ram, injector, pager?)?))
    }
}
