//! Stock QEMUs with the micro guest and RAM of a chosen kind, started without Rekindle.

use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use serde_json::Value;
use std::ops::Deref;
use std::path::Path;

/// Kind of the guest's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ram {
    /// A shared file.
    File,
    /// A shared memfd.
    Memfd,
    /// Private memory, as with `-m`.
    Private,
}

/// Options of a QEMU.
pub struct Config<'a> {
    options: QemuOptions<'a>,
    ram: Ram,
}

impl<'a> Config<'a> {
    pub fn new(binary: &'a Path, ram: Ram) -> Self {
        Self { options: QemuOptions::new(binary), ram }
    }

    /// Adds arguments.
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.options = self.options.arguments(arguments);
        self
    }

    /// Adds an archive that is unpacked over the guest's initial RAM disk; [`overlay`] makes one.
    pub fn overlay(mut self, archive: Vec<u8>) -> Self {
        self.options = self.options.overlay(archive);
        self
    }
}

/// RAM of each guest in MiB.
pub const MIB: u64 = 192;

/// A running QEMU and the directory of its files.
pub struct Qemu {
    // The field order drops QEMU before the directory.
    qemu: ForeignQemu,
    _directory: tempfile::TempDir,
}

impl Deref for Qemu {
    type Target = ForeignQemu;

    fn deref(&self) -> &ForeignQemu {
        &self.qemu
    }
}

impl Qemu {
    /// Starts a QEMU. Returns before its guest is up.
    pub fn start(config: Config<'_>) -> Self {
        Self::start_with(config, ForeignQemu::start)
    }

    /// Starts a QEMU and waits until its guest is up.
    pub fn boot(config: Config<'_>) -> Self {
        Self::start_with(config, ForeignQemu::boot)
    }

    fn start_with(config: Config<'_>, start: impl FnOnce(&Path, &QemuOptions<'_>) -> ForeignQemu) -> Self {
        let directory = tempfile::Builder::new().prefix("rekindle-test-").tempdir_in("/dev/shm").unwrap();
        let backend = match config.ram {
            Ram::File => {
                let path = directory.path().join("ram");
                format!("memory-backend-file,id=ram,size={MIB}M,share=on,mem-path={}", path.display())
            }
            Ram::Memfd => format!("memory-backend-memfd,id=ram,size={MIB}M,share=on"),
            Ram::Private => format!("memory-backend-ram,id=ram,size={MIB}M"),
        };
        let options = config.options.arguments(&["-machine", "q35,memory-backend=ram,suppress-vmdesc=on"]);
        let options = options.arguments(&["-m", &format!("{MIB}M"), "-object", &backend]);
        let options = options.arguments(&["-global", "migration.send-configuration=off"]);
        Self { qemu: start(directory.path(), &options), _directory: directory }
    }

    /// Fills memory with a pattern, and rewrites random parts of it continuously.
    #[track_caller]
    pub fn write_continuously(&self) {
        self.ask("touch 48M 7");
        self.ask("dirty 20 48 random");
    }

    /// Asserts that the pattern is intact.
    #[track_caller]
    pub fn verify(&self) {
        self.ask("dirty 0");
        assert!(self.ask("verify").parse::<u64>().unwrap() > 0);
    }
}

/// Stops the guest.
pub fn pause(qmp: &mut Qmp) {
    let _: Value = qmp.execute("stop", ()).unwrap();
}

/// Resumes the guest.
pub fn resume(qmp: &mut Qmp) {
    let _: Value = qmp.execute("cont", ()).unwrap();
}

/// Reads all blocks of a stopped guest.
pub fn content_of_blocks(ram: &GuestRam) -> Vec<Vec<u8>> {
    ram.blocks().iter().map(|block| super::content(ram, block)).collect()
}

/// Returns an archive (cpio, `newc`) of files with their modes, for [`Config::overlay`].
pub fn overlay(files: &[(&str, u32, &str)]) -> Vec<u8> {
    let mut archive = Vec::new();
    let end = [("TRAILER!!!", 0, "")];
    for (number, (name, mode, content)) in files.iter().chain(&end).enumerate() {
        let fields = [number as u32 + 1, *mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        archive.extend(b"070701");
        archive.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        archive.extend(name.as_bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(content.as_bytes());
        archive.resize(archive.len().next_multiple_of(4), 0);
    }
    archive
}
