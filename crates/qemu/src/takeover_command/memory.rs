//! The machine type and the guest's RAM. Each *memory backend*, QEMU's object for a piece of RAM, becomes one on a memfd
//! with the same id. Its RAM block must have the same name, which depends on the machine type and the kind of backend.

use super::{Descriptor, Rewriter};
use crate::command::RamBackend;
use crate::foreign::CommandOption;
use crate::options::Options;

/// Properties of a backend that do not depend on where its memory is.
const KEPT_PROPERTIES: [&str; 7] = ["id", "size", "host-nodes", "policy", "dump", "merge", "reserve"];

/// A RAM block of a backend.
struct BackendBlock {
    name: String,
    bytes: u64,
    page_bytes: u64,
}

impl Rewriter<'_> {
    /// Keeps the machine's options, with the versioned type.
    pub(super) fn read_machine(&mut self, option: &CommandOption<'_>) {
        let Some(mut machine) = self.parse(option, "type") else { return };
        for key in ["confidential-guest-support", "memory-encryption"] {
            if machine.get(key).is_some() {
                self.refuse(format!("-machine {key}"), "the guest's memory is encrypted");
            }
        }
        self.given.memory_backend |= machine.get("memory-backend").is_some();
        if let Some(given) = machine.get("type") {
            self.given.machine_type = true;
            // Proxmox adds its own version, which QEMU's type does not contain: `q35+pve0`.
            let (given_type, suffix) = given.split_at(given.find('+').unwrap_or(given.len()));
            if given_type != self.facts.machine.machine && given != self.facts.machine.machine {
                machine.set("type", &format!("{}{suffix}", self.facts.machine.machine));
                self.add(option.name, machine.to_string());
                return;
            }
        }
        self.keep_unchanged(option);
    }

    /// Puts the RAM of the backend `id` on a memfd.
    pub(super) fn read_backend(&mut self, id: &str, mut backend: Options) {
        self.backends.push(id.to_owned());
        let is_on = |key: &str| backend.get(key).is_some_and(|value| value == "on");
        if is_on("readonly") || is_on("pmem") {
            self.refuse(format!("memory backend {id}"), "its content is a file of its own, which is not copied");
            return;
        }
        let Some(block) = self.block_of(id) else { return };
        backend.remove(|key| key != "qom-type" && !KEPT_PROPERTIES.contains(&key));
        self.add_backend(backend, block);
    }

    /// Adds a memory backend on a memfd. `backend` has its id, its size and its policy.
    fn add_backend(&mut self, mut backend: Options, block: BackendBlock) {
        let BackendBlock { name, bytes, page_bytes } = block;
        let has_canonical_name = name.starts_with("/objects/");
        let number = self.numbers.put_new(Descriptor::Ram { block: name, bytes, page_bytes });
        backend.set("qom-type", "memory-backend-file");
        backend.set("mem-path", &format!("/proc/self/fd/{number}"));
        backend.set_switch("share", true);
        backend.set_switch("prealloc", false);
        // The default is not the same for all machine types and backends.
        backend.set_switch("x-use-canonical-path-for-ramblock-id", has_canonical_name);
        self.add("object", backend.to_string());
    }

    /// Returns the RAM block of the present backend `id`. `None` after an obstacle was added.
    fn block_of(&mut self, id: &str) -> Option<BackendBlock> {
        let backend = self.facts.machine.backends.iter().find(|backend| backend.id == id)?;
        let names = [id.to_owned(), format!("/objects/{id}")];
        let is_block = |block: &&crate::ramblock::RamBlock| names.contains(&block.id) && block.used == backend.bytes;
        let Some(block) = self.facts.ram_blocks.iter().find(is_block) else {
            let why = format!("no RAM block of {} bytes has its name", backend.bytes);
            self.refuse(format!("memory backend {id}"), why);
            return None;
        };
        Some(BackendBlock { name: block.id.clone(), bytes: backend.bytes, page_bytes: block.page_size })
    }

    /// Adds what the command line does not name: the machine type, the backend that QEMU made for `-m`, and those of memory
    /// that was plugged in while the guest ran.
    pub(super) fn finish_machine(&mut self) {
        if !self.given.machine_type {
            let machine = Options::Pairs(vec![("type".into(), Some(self.facts.machine.machine.clone()))]);
            self.add("machine", machine.to_string());
        }
        let facts = &self.facts.machine;
        if facts.backends.is_empty() {
            let why = "it is no memory backend of QEMU's: that needs QEMU 5.0 and a usual machine type";
            self.refuse("the guest's memory", why);
        }
        if !self.given.memory_size {
            let is_at_start = |backend: &&RamBackend| {
                facts.main_backend.as_ref() == Some(&backend.id) || self.backends.contains(&backend.id)
            };
            let bytes: u64 = facts.backends.iter().filter(is_at_start).map(|backend| backend.bytes).sum();
            // `K` is KiB.
            self.add("m", format!("{}K", bytes / 1024));
        }
        for backend in &facts.backends {
            let id = &backend.id;
            if self.backends.contains(id) {
                continue;
            }
            if let Some(block) = self.block_of(id) {
                let pair = |key: &str, value: String| (key.to_owned(), Some(value));
                let kind = pair("qom-type", String::new());
                let pairs = vec![kind, pair("id", id.clone()), pair("size", block.bytes.to_string())];
                self.add_backend(Options::Pairs(pairs), block);
                if !self.given.memory_backend && facts.main_backend.as_ref() == Some(id) {
                    let machine = Options::Pairs(vec![("memory-backend".into(), Some(id.clone()))]);
                    self.add("machine", machine.to_string());
                }
            }
        }
    }
}
