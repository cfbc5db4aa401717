//! From TOML to a [`Definition`]: the keys, their defaults, and which keys exclude or require each other.

mod disks;
mod nets;
mod phase;

use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::DeTable;

use super::document::{Document, Section, quoted};
use super::error::{DefinitionError, Problem};
use super::files::{self, PathKind, read_path};
use super::names::check_id;
use super::{
    Accel, Boot, Bytes, Definition, DefinitionErrors, Devices, Name, OnCrash, OnReboot, Phase, Ram, Span, arguments,
};

/// Hint if no cache can be retained over a reboot.
const NO_CACHE: &str = "no disk has a server, which knows what the guest has cached; let a [[disk]] have one (a raw image, without `server = false`), or \
     leave this out";
/// Hint if there is no phase to continue from.
const NO_PHASE: &str =
    "no phase of its boot is kept; name those that its guest announces under [phase], or leave this out";

/// The actions when a guest ends by itself, by their names: a plain one, `warm-cache`, `phase`.
type EndActions<T> = [(&'static str, T); 3];
const ON_REBOOT: EndActions<OnReboot> =
    [("reset", OnReboot::Reset), ("warm-cache", OnReboot::WarmCache), ("phase", OnReboot::Phase)];
const ON_CRASH: EndActions<OnCrash> =
    [("leave", OnCrash::Leave), ("warm-cache", OnCrash::WarmCache), ("phase", OnCrash::Phase)];
const ACCELS: &[(&str, Accel)] = &[("auto", Accel::Auto), ("kvm", Accel::Kvm), ("tcg", Accel::Tcg)];

/// Parses and checks the text of a definition file.
pub(super) fn parse(text: &str, base: &Path, file: &str) -> Result<Definition, DefinitionErrors> {
    if let Some(advice) = advice_for_xml(text) {
        let error = DefinitionError { line: 1, column: 1, problem: Problem::Xml(advice) };
        return Err(DefinitionErrors { file: file.to_owned(), errors: vec![error] });
    }
    let document = Document::new(text, base, file);
    let definition = document.parse_tree().and_then(|tree| read_definition(&document, &tree));
    match definition {
        Some(definition) if document.has_no_problem() => Ok(definition),
        _ => Err(document.into_errors()),
    }
}

/// Returns advice for a file that is XML, most likely a libvirt domain.
fn advice_for_xml(text: &str) -> Option<String> {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if !text.starts_with('<') {
        return None;
    }
    if !text.contains("<domain") {
        return Some(
            "this is XML, and not the definition of a VM, which is TOML: docs/vm-definition.md describes it".into(),
        );
    }
    let name = text.split_once("<name>").and_then(|(_, rest)| rest.split_once("</name>")).map(|(name, _)| name.trim());
    let name = name.filter(|name| !name.is_empty() && !name.contains(['<', '>', '\n'])).unwrap_or("DOMAIN");
    Some(format!(
        "this is a libvirt domain (XML), and not the definition of a VM, which is TOML; to use it with Rekindle, start it with libvirt (virsh \
         start {name}) and attach to it: rekindle attach NAME --libvirt {name}"
    ))
}

/// Reads the definition. Mistakes are recorded in the document. `None` only if the name, which has no placeholder, is
/// missing or wrong.
fn read_definition<'d>(document: &'d Document<'d>, tree: &'d Spanned<DeTable<'d>>) -> Option<Definition> {
    let top = Section::top(document, tree);
    let name = read_name(&top);
    let ram = read_ram(&top);
    let memory = read_memory(&top, &ram);
    let accel = top.choice("accel", ACCELS).unwrap_or(Accel::Auto);
    let qemu_args = top.texts("qemu_args");
    arguments::check(&top, &qemu_args);
    let boot = read_boot(&top);
    let disks = disks::read(&top);
    let nets = nets::read(&top, name.as_ref().map_or("", Name::as_str));
    let has_server = disks.iter().any(|disk| disk.server);
    let devices = read_devices(&top);
    let phase = phase::read(&top, &disks, devices.agent);
    Some(Definition {
        memory,
        vcpus: top.number("vcpus", 1, u8::MAX).unwrap_or(1),
        accel,
        machine: read_machine(&top),
        cpu: read_cpu(&top, accel),
        qemu: read_qemu(&top),
        probe: top.parsed("probe"),
        shutdown_timeout: read_shutdown_timeout(&top),
        on_reboot: read_end_action(&top, "on_reboot", &ON_REBOOT, has_server, &phase),
        on_crash: read_end_action(&top, "on_crash", &ON_CRASH, has_server, &phase),
        save_dir: read_path(&top, "save_dir", PathKind::Folder),
        qemu_args: qemu_args.into_iter().map(|argument| argument.text.to_owned()).collect(),
        ram,
        boot,
        devices,
        phase,
        disks,
        nets,
        name: name?,
    })
}

fn read_name(top: &Section<'_>) -> Option<Name> {
    if !top.has("name") {
        top.record_missing("name", "write for example name = \"web\" at the top");
    }
    top.parsed("name")
}

fn read_ram(top: &Section<'_>) -> Ram {
    let section = top.section("ram");
    Ram { dir: read_path(&section, "dir", PathKind::Folder), prealloc: section.flag("prealloc", false) }
}

fn read_memory(top: &Section<'_>, ram: &Ram) -> Bytes {
    let page_size = ram.dir.as_deref().and_then(files::huge_page_size);
    let Some(memory) = top.quantity("memory") else { return Bytes::from_mib(512) };
    if let Some(why) = memory_flaw(memory, page_size, "`ram.dir`") {
        top.reject("memory", why);
    }
    memory
}

fn read_cpu(top: &Section<'_>, accel: Accel) -> String {
    let cpu = read_word(top, "cpu", "auto");
    if accel == Accel::Tcg && cpu.split(',').next() == Some("host") {
        top.conflict(
            "cpu",
            "`cpu = \"host\"` needs KVM, but `accel` is \"tcg\"; write cpu = \"auto\" or a model that `qemu-system-x86_64 -cpu help` lists",
        );
    }
    cpu
}

fn read_machine(top: &Section<'_>) -> String {
    let machine = read_word(top, "machine", "q35");
    if machine.contains(',') {
        let why = "holds options, but only a type can be pinned; write the type alone, for example \"q35\"";
        top.reject("machine", why);
    }
    machine
}

/// Reads a text that is not empty and has no blanks; returns `default` if it is absent or wrong.
fn read_word(top: &Section<'_>, key: &'static str, default: &str) -> String {
    let check = |text: &str| match text {
        "" => Err(format!("empty; leave the key out for {}", quoted(default))),
        _ if text.contains(char::is_whitespace) => Err("holds a blank; write one word".to_owned()),
        _ => Ok(()),
    };
    top.checked(key, check).unwrap_or(default).to_owned()
}

/// Reads the binary: a bare name is kept, to be looked up in `PATH` at each start; a path must exist.
fn read_qemu(top: &Section<'_>) -> PathBuf {
    let name = top.text("qemu").unwrap_or("qemu-system-x86_64");
    if name.contains('/') || name.is_empty() {
        read_path(top, "qemu", PathKind::File).unwrap_or_default()
    } else {
        PathBuf::from(name)
    }
}

fn read_shutdown_timeout(top: &Section<'_>) -> Span {
    let Some(timeout) = top.quantity::<Span>("shutdown_timeout") else { return Span::from_secs(60) };
    if timeout.as_millis() == 0 {
        top.reject("shutdown_timeout", "leaves the guest no time to shut down; write for example \"60s\"");
    }
    timeout
}

/// Reads `[boot]`. Without it, a disk must be there to boot from.
fn read_boot(top: &Section<'_>) -> Option<Boot> {
    let section = top.section("boot");
    if section.is_empty() && top.is_missing("disk") {
        top.conflict_of_section(
            "there is nothing to boot; write [boot] with kernel = \"bzImage\", or [[disk]] with path = \"disk.img\"",
        );
    }
    let kernel = read_path(&section, "kernel", PathKind::File);
    let initrd = read_path(&section, "initrd", PathKind::File);
    let append = section.text("append").unwrap_or_default().to_owned();
    if !section.has("kernel") {
        for key in ["initrd", "append"].into_iter().filter(|key| section.has(key)) {
            let why = format!(
                "`boot.{key}` needs `boot.kernel`; add kernel = \"bzImage\", or leave `{key}` to the disk's boot loader"
            );
            section.conflict(key, why);
        }
    }
    Some(Boot { kernel: kernel?, initrd, append })
}

fn read_devices(top: &Section<'_>) -> Devices {
    let section = top.section("devices");
    let default = Devices::default();
    Devices {
        vga: section.flag("vga", default.vga),
        agent: section.flag("agent", default.agent),
        rng: section.flag("rng", default.rng),
        vmgenid: section.flag("vmgenid", default.vmgenid),
    }
}

/// Reads the action when a guest ends by itself. The default is `warm-cache` if a disk has a server.
fn read_end_action<T: Copy + PartialEq>(
    top: &Section<'_>,
    key: &'static str,
    actions: &EndActions<T>,
    has_server: bool,
    phases: &Phase,
) -> T {
    let [(_, plain), (_, warm_cache), (_, phase)] = *actions;
    let action = top.choice(key, actions).unwrap_or(if has_server { warm_cache } else { plain });
    if action == warm_cache && !has_server {
        top.reject(key, NO_CACHE);
    }
    if action == phase && phases.is_empty() {
        top.reject(key, NO_PHASE);
    }
    action
}

/// Returns why this amount of memory is not possible; `huge_page` is the page size if `location` is on hugetlbfs.
pub(crate) fn memory_flaw(memory: Bytes, huge_page: Option<Bytes>, location: &str) -> Option<String> {
    let unit = huge_page.map_or(1 << 20, |page| page.as_u64().max(1 << 20));
    let bytes = memory.as_u64();
    if bytes == 0 {
        return Some("no guest runs without memory; write for example \"512M\"".to_owned());
    }
    if i64::try_from(bytes).is_err() {
        return Some("more than QEMU can address; write less".to_owned());
    }
    if bytes.is_multiple_of(unit) {
        return None;
    }
    let below = Bytes::new(bytes - bytes % unit);
    let above = Bytes::new(below.as_u64() + unit);
    let hint = if below.as_u64() == 0 { format!("\"{above}\"") } else { format!("\"{below}\" or \"{above}\"") };
    let unit = Bytes::new(unit);
    Some(match huge_page {
        Some(_) => format!("not a multiple of {unit}, the page size of {location}; write {hint}"),
        None => format!("not a multiple of {unit}; write {hint}"),
    })
}

/// Returns the section's id, or its default by position.
fn read_id(section: &Section<'_>, index: usize, ids: &mut UniqueValues) -> String {
    let id = section.checked("id", check_id).map_or_else(|| format!("{}{index}", section.name()), str::to_owned);
    ids.claim(section, "id", &id);
    id
}

/// The values of a key that must differ from section to section.
struct UniqueValues {
    claimed: Vec<ClaimedValue>,
    /// What to do about a value that occurs twice.
    hint: &'static str,
}

struct ClaimedValue {
    value: String,
    offset: usize,
}

impl UniqueValues {
    fn new(hint: &'static str) -> Self {
        Self { claimed: Vec::new(), hint }
    }

    /// Claims the value of a section's key, which may be a default. A value that is claimed already is recorded as a
    /// mistake.
    fn claim(&mut self, section: &Section<'_>, key: &'static str, value: &str) {
        self.claim_at(section, key, value, section.offset(key));
    }

    /// As [`UniqueValues::claim`], for a value at a byte offset.
    fn claim_at(&mut self, section: &Section<'_>, key: &str, value: &str, offset: usize) {
        if let Some(first) = self.claimed.iter().find(|claimed| claimed.value == value) {
            record_duplicate(section, key, value, offset, first.offset, self.hint);
        }
        self.claimed.push(ClaimedValue { value: value.to_owned(), offset });
    }
}

/// Records that the value at `offset` is the same as, or collides with, the one at `first_offset`.
fn record_duplicate(
    section: &Section<'_>,
    key: &str,
    value: &str,
    offset: usize,
    first_offset: usize,
    hint: &'static str,
) {
    let line = section.document().line(first_offset);
    let problem = Problem::Duplicate { key: section.path(key), value: quoted(value), line, hint };
    section.document().record(offset, problem);
}
