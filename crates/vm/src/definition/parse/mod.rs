//! From TOML to a [`Definition`]: the keys, their defaults, and which keys exclude or require each other.

mod disks;
mod nets;
mod phase;

use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::DeTable;

use super::document::{Document, Section, quoted};
use super::error::{DefinitionError, Problem};
use super::files::{self, Wanted};
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
const ON_REBOOT: [(&str, OnReboot); 3] =
    [("reset", OnReboot::Reset), ("warm-cache", OnReboot::WarmCache), ("phase", OnReboot::Phase)];
const ON_CRASH: [(&str, OnCrash); 3] =
    [("leave", OnCrash::Leave), ("warm-cache", OnCrash::WarmCache), ("phase", OnCrash::Phase)];
const ACCELS: &[(&str, Accel)] = &[("auto", Accel::Auto), ("kvm", Accel::Kvm), ("tcg", Accel::Tcg)];

pub(super) fn parse(text: &str, base: &Path, file: &str) -> Result<Definition, DefinitionErrors> {
    if let Some(advice) = xml(text) {
        let error = DefinitionError { line: 1, column: 1, problem: Problem::Xml(advice) };
        return Err(DefinitionErrors { file: file.to_owned(), errors: vec![error] });
    }
    let document = Document::new(text, base, file);
    let definition = document.tree().and_then(|tree| definition(&document, &tree));
    match definition {
        Some(definition) if document.is_clean() => Ok(definition),
        _ => Err(document.into_errors()),
    }
}

/// Returns advice for a file that is XML, most likely a libvirt domain.
fn xml(text: &str) -> Option<String> {
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
fn definition<'d>(document: &'d Document<'d>, tree: &'d Spanned<DeTable<'d>>) -> Option<Definition> {
    let top = Section::top(document, tree);
    let name = name(&top);
    let stem = name.as_ref().map_or("", Name::as_str);
    let ram = ram(&top);
    let memory = memory(&top, &ram);
    let accel = top.choice("accel", ACCELS).map_or(Accel::Auto, |found| found.value);
    let cpu = word(&top, "cpu", "auto");
    if (accel, cpu.split(',').next()) == (Accel::Tcg, Some("host")) {
        document.conflict(
            top.at("cpu").unwrap_or_default(),
            "`cpu = \"host\"` needs KVM, but `accel` is \"tcg\"; write cpu = \"auto\" or a model that `qemu-system-x86_64 -cpu help` lists",
        );
    }
    let machine = word(&top, "machine", "q35");
    if machine.contains(',') {
        let why = "holds options, but only a type can be pinned; write the type alone, for example \"q35\"";
        top.reject("machine", why);
    }
    let shutdown_timeout = top.quantity::<Span>("shutdown_timeout");
    if shutdown_timeout.is_some_and(|timeout| timeout.value.as_millis() == 0) {
        let why = "leaves the guest no time to shut down; write for example \"60s\"";
        top.reject("shutdown_timeout", why);
    }
    let qemu_args = top.texts("qemu_args");
    arguments::check(&top, &qemu_args);
    let boot_section = top.section("boot");
    let boot = boot(&boot_section);
    let disks = disks::read(&top);
    if boot_section.is_empty() && top.is_missing("disk") {
        let why =
            "there is nothing to boot; write [boot] with kernel = \"bzImage\", or [[disk]] with path = \"disk.img\"";
        document.conflict(0, why);
    }
    let nets = nets::read(&top, stem);
    let served = disks.iter().any(|disk| disk.server);
    let devices = devices(&top);
    let phase = phase::read(&top, &disks, devices.agent);
    let on_reboot = after_end(&top, "on_reboot", ON_REBOOT, served, &phase);
    let on_crash = after_end(&top, "on_crash", ON_CRASH, served, &phase);
    Some(Definition {
        memory,
        vcpus: top.number("vcpus", 1, u8::MAX).map_or(1, |found| found.value),
        accel,
        machine,
        cpu,
        qemu: qemu(&top),
        probe: top.parsed("probe").map(|found| found.value),
        shutdown_timeout: shutdown_timeout.map_or(Span::from_secs(60), |found| found.value),
        on_reboot,
        on_crash,
        save_dir: files::path(&top, "save_dir", Wanted::Folder).map(|found| found.value),
        qemu_args: qemu_args.into_iter().map(|argument| argument.value.to_owned()).collect(),
        ram,
        boot,
        devices,
        phase,
        disks,
        nets,
        name: name?,
    })
}

/// Returns the action when a guest ends by itself. The default is `warm` if a disk has a server, otherwise `plain`.
fn after_end<T: Copy + PartialEq>(
    top: &Section<'_>,
    key: &'static str,
    [plain, warm, phase]: [(&str, T); 3],
    served: bool,
    phases: &Phase,
) -> T {
    let usual = if served { warm.1 } else { plain.1 };
    let found = top.choice(key, &[plain, warm, phase]).map_or(usual, |found| found.value);
    if found == warm.1 && !served {
        top.reject(key, NO_CACHE);
    }
    if found == phase.1 && phases.is_empty() {
        top.reject(key, NO_PHASE);
    }
    found
}

fn name(top: &Section<'_>) -> Option<Name> {
    if top.at("name").is_none() {
        top.missing("name", "write for example name = \"web\" at the top");
    }
    top.parsed("name").map(|found| found.value)
}

/// Reads a text that is not empty and has no blanks; returns `default` if it is absent or wrong.
fn word(top: &Section<'_>, key: &'static str, default: &str) -> String {
    let check = |text: &str| match text {
        "" => Err(format!("empty; leave the key out for {}", quoted(default))),
        _ if text.contains(char::is_whitespace) => Err("holds a blank; write one word".to_owned()),
        _ => Ok(()),
    };
    top.checked(key, check).map_or(default, |found| found.value).to_owned()
}

/// Reads the binary: a bare name is kept, to be looked up in `PATH` at each start; a path must exist.
fn qemu(top: &Section<'_>) -> PathBuf {
    let named = top.text("qemu").map_or("qemu-system-x86_64", |found| found.value);
    if named.contains('/') || named.is_empty() {
        files::path(top, "qemu", Wanted::File).map(|found| found.value).unwrap_or_default()
    } else {
        PathBuf::from(named)
    }
}

fn ram(top: &Section<'_>) -> Ram {
    let section = top.section("ram");
    let dir = files::path(&section, "dir", Wanted::Folder).map(|found| found.value);
    Ram { dir, prealloc: section.flag("prealloc", false) }
}

fn memory(top: &Section<'_>, ram: &Ram) -> Bytes {
    let default = Bytes::from_mib(512);
    let huge = ram.dir.as_deref().and_then(files::huge_page);
    let Some(memory) = top.quantity::<Bytes>("memory") else { return default };
    if let Some(why) = memory_flaw(memory.value, huge, "`ram.dir`") {
        top.reject("memory", why);
    }
    memory.value
}

/// Returns why this amount of memory is not possible; `huge` is the page size if `place` is on hugetlbfs.
pub(crate) fn memory_flaw(memory: Bytes, huge: Option<Bytes>, place: &str) -> Option<String> {
    let unit = huge.map_or(1 << 20, |huge| huge.as_u64().max(1 << 20));
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
    Some(match huge {
        Some(_) => format!("not a multiple of {unit}, the page size of {place}; write {hint}"),
        None => format!("not a multiple of {unit}; write {hint}"),
    })
}

fn boot(section: &Section<'_>) -> Option<Boot> {
    let kernel = files::path(section, "kernel", Wanted::File);
    let initrd = files::path(section, "initrd", Wanted::File).map(|found| found.value);
    let append = section.text("append").map_or("", |found| found.value).to_owned();
    if section.at("kernel").is_none() {
        for (key, at) in ["initrd", "append"].into_iter().filter_map(|key| Some((key, section.at(key)?))) {
            let why = format!(
                "`boot.{key}` needs `boot.kernel`; add kernel = \"bzImage\", or leave `{key}` to the disk's boot loader"
            );
            section.document().conflict(at, why);
        }
    }
    Some(Boot { kernel: kernel?.value, initrd, append })
}

fn devices(top: &Section<'_>) -> Devices {
    let section = top.section("devices");
    let default = Devices::default();
    Devices {
        vga: section.flag("vga", default.vga),
        agent: section.flag("agent", default.agent),
        rng: section.flag("rng", default.rng),
        vmgenid: section.flag("vmgenid", default.vmgenid),
    }
}

/// Returns the section's id, or its default by position.
fn id(section: &Section<'_>, index: usize, taken: &mut Taken) -> String {
    let given = section.checked("id", check_id);
    let at = given.map_or(section.at, |found| found.at);
    let id = given.map_or_else(|| format!("{}{index}", section.name()), |found| found.value.to_owned());
    taken.claim(section, "id", id.clone(), at);
    id
}

/// Values that must be unique, each with its byte offset.
struct Taken {
    seen: Vec<(String, usize)>,
    hint: &'static str,
}

impl Taken {
    fn new(hint: &'static str) -> Self {
        Self { seen: Vec::new(), hint }
    }

    /// Claims a value, and records a mistake if it is taken already.
    fn claim(&mut self, section: &Section<'_>, key: &'static str, value: String, at: usize) {
        if let Some((_, first)) = self.seen.iter().find(|(seen, _)| *seen == value) {
            let (line, _) = section.document().position(*first);
            let problem = Problem::Duplicate { key: section.path(key), value: quoted(&value), line, hint: self.hint };
            section.document().note(at, problem);
        }
        self.seen.push((value, at));
    }
}
