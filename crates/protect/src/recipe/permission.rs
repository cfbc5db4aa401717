//! Whether this host may run what a recipe describes. The only way to an [`AllowedRecipe`] or an [`AllowedDomain`], which a
//! restore needs.
//!
//! A recipe comes from a store or from another host, so nothing in it is trusted. It may use
//!
//! - what the operator names for this restore (`--definition`, `--qemu`), or in a definition of the VM on this host;
//! - what this host has run as the same VM before, which [`remember`] has recorded;
//! - what [`RestoreRules`] allows on this host.

use super::{Recipe, RecipeError};
use rekindle_libvirt::host_access::{self as domain_access, DomainUses, UsedFile};
use rekindle_qemu::command::{ForeignMachine, Hardware};
use rekindle_qemu::host_access::{self, HostAccess, is_plain_name};
use rekindle_vm::definition::{Definition, DiskFormat, Name};
use rekindle_vm::host::{Host, make_private};
use rekindle_vm::overlays::OverlayEpoch;
use rekindle_vm::restore_rules::{RestoreRules, find_program, images_below, option_texts};
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Directory in which libvirt makes the variables of UEFI.
const VARIABLES_DIRECTORY: &str = "/var/lib/libvirt/qemu/nvram";

/// What checkpoints of one VM may use of this host.
#[derive(Debug)]
pub(crate) struct Permission {
    name: Name,
    rules: RestoreRules,
    /// A definition and a QEMU that the operator has named.
    given: Option<Definition>,
    qemu: Option<PathBuf>,
    known: KnownUses,
    /// The domain of libvirt that this host has run as the VM.
    domain: Option<DomainUses>,
    /// Name of the domain that the operator has named.
    given_domain: Option<String>,
}

/// What this host has run as a VM. The file of [`remember`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RunMachine {
    recipe: Recipe,
    domain: Option<DomainUses>,
    /// The images below those of the domain's disks.
    #[serde(default)]
    images_below: Vec<PathBuf>,
}

/// What the operator of this host names for a restore.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OperatorChoice<'a> {
    /// The definition to use instead of the recipe's.
    pub(crate) definition: Option<&'a Definition>,
    /// The VM's definition on this host, which is not used, but whose files are allowed.
    pub(crate) local_definition: Option<&'a Definition>,
    pub(crate) qemu: Option<&'a Path>,
    /// libvirt's name of the VM on this host.
    pub(crate) domain: Option<&'a str>,
}

/// What this host has used for the VM already, or its operator has named for it.
#[derive(Debug, Default)]
struct KnownUses {
    programs: BTreeSet<PathBuf>,
    arguments: BTreeSet<String>,
    paths: BTreeSet<PathBuf>,
}

/// A recipe that this host may run, in a QEMU that Rekindle starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AllowedRecipe {
    recipe: Recipe,
    /// The definition to use: the operator's, or else that of the recipe.
    definition: Definition,
    /// Whether the operator has specified the definition for this host.
    is_users_definition: bool,
    /// The QEMU that the operator has named.
    qemu: Option<PathBuf>,
}

/// The recipe of a domain that libvirt may run on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AllowedDomain {
    recipe: Recipe,
    xml: String,
}

impl Permission {
    /// Determines what checkpoints of the VM `name` may use. Must precede the removal of what is left of the VM.
    pub(crate) fn of(host: &Host, name: &Name, choice: OperatorChoice<'_>) -> Arc<Self> {
        let mut known = KnownUses::default();
        let recorded = recorded(host, name);
        if let Some(RunMachine { recipe, images_below, .. }) = &recorded {
            known.add(recipe);
            known.paths.extend(images_below.iter().cloned());
        }
        let state = State::read(&RunDir::new(&host.root, name.as_str())).ok().flatten();
        let prepared = state.as_ref().and_then(|state| state.prepared.as_ref());
        // The options of the preparation still apply.
        let given = choice.definition.cloned().or_else(|| prepared.and_then(|prepared| prepared.given.clone()));
        let qemu = choice.qemu.map(Path::to_owned).or_else(|| prepared.and_then(|prepared| prepared.qemu.clone()));
        for definition in given.as_ref().into_iter().chain(choice.local_definition) {
            known.add_definition(definition);
        }
        let given_domain = choice.domain.map(str::to_owned);
        let domain = recorded.and_then(|recorded| recorded.domain);
        Arc::new(Self {
            name: name.clone(),
            rules: host.restore_rules.clone(),
            given,
            qemu,
            known,
            domain,
            given_domain,
        })
    }

    /// Checks a recipe that Rekindle is to run. `overlays`: the disks of its checkpoint that are on overlays.
    pub(crate) fn allow(&self, recipe: Recipe, overlays: &[OverlayEpoch]) -> Result<AllowedRecipe, RecipeError> {
        let mut problems = Vec::new();
        let definition = self.given.as_ref().unwrap_or(&recipe.definition);
        if self.qemu.is_none() && self.given.is_none() {
            problems.extend(self.check_program(&definition.qemu).err());
        }
        match &recipe.hardware.foreign {
            Some(machine) => problems.extend(self.problems_of_foreign(&recipe.hardware, machine)),
            None if recipe.hardware.nets.len() > definition.nets.len() => {
                problems.push("its hardware has networks that its definition does not have".into());
            }
            None => {}
        }
        if self.given.is_none() {
            problems.extend(self.problems_of_definition(&recipe));
        }
        if !is_plain_name(&recipe.hardware.machine) {
            problems.push(format!("machine type {}", recipe.hardware.machine));
        }
        problems.extend(self.problems_of_overlays(overlays));
        self.require_none(problems)?;
        let mut definition = Definition { name: self.name.clone(), ..definition.clone() };
        // A QEMU that was not checked must not be in it.
        if let Some(qemu) = self.qemu.as_ref().filter(|_| self.given.is_none()) {
            definition.qemu.clone_from(qemu);
        }
        Ok(AllowedRecipe { recipe, definition, is_users_definition: self.given.is_some(), qemu: self.qemu.clone() })
    }

    /// Checks the recipe of a domain that libvirt is to run. `defined_xml` returns this host's own definition of the domain
    /// with a UUID. `None`: the recipe is not of a domain.
    pub(crate) fn allow_domain(
        &self,
        recipe: Recipe,
        overlays: &[OverlayEpoch],
        defined_xml: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<AllowedDomain>, RecipeError> {
        let Some(xml) = recipe.domain_xml().map(str::to_owned) else { return Ok(None) };
        let mut problems: Vec<String> = Vec::new();
        // `qemu-img` is started next to it.
        problems.extend(self.check_program(&recipe.definition.qemu).err());
        if !is_plain_name(&recipe.hardware.machine) {
            problems.push(format!("machine type {}", recipe.hardware.machine));
        }
        match domain_access::of_domain(&xml) {
            Err(why) => problems.push(format!("libvirt's description of the domain: {why}")),
            Ok(uses) => problems.extend(self.problems_of_domain(&uses, defined_xml)),
        }
        for path in [&recipe.definition.save_dir, &recipe.definition.ram.dir].into_iter().flatten() {
            problems.extend(self.check_path("a directory of the definition", path).err());
        }
        problems.extend(self.problems_of_overlays(overlays));
        self.require_none(problems)?;
        Ok(Some(AllowedDomain { recipe, xml }))
    }

    fn problems_of_domain(&self, uses: &DomainUses, defined_xml: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
        // Other texts could be the name of another domain.
        if uses.uuid.parse::<uuid::Uuid>().is_err() {
            return vec![format!("<uuid> in libvirt's description of the domain: {} is no UUID", uses.uuid)];
        }
        let defined = match self.definition_of(uses, defined_xml) {
            Ok(defined) => defined,
            Err(problem) => return vec![problem],
        };
        // A transient domain has no definition any more.
        let run = self.domain.as_ref().filter(|run| run.name == uses.name && run.uuid == uses.uuid);
        let known: Vec<_> = [Some(&defined), run].into_iter().flatten().collect();
        let mut problems: Vec<_> =
            uses.emulators.iter().filter_map(|emulator| self.check_program(emulator).err()).collect();
        for file in uses.files.iter().filter(|file| !known.iter().any(|known| known.files.contains(file))) {
            problems.extend(self.check_domain_file(uses, file).err());
        }
        if !known.iter().any(|known| known.arguments == uses.arguments) {
            let texts = option_texts(&uses.arguments);
            let why = "an argument of QEMU in <qemu:commandline>";
            problems.extend(texts.iter().filter_map(|text| self.rules.check_argument(text, why).err()));
        }
        for element in
            uses.elements.iter().filter(|element| !known.iter().any(|known| known.elements.contains(element)))
        {
            problems.extend(self.rules.check_element(&element.name, &element.why).err());
        }
        problems
    }

    /// Returns what this host's own definition of the domain uses. The store chooses name and UUID of its domain, so they must
    /// be those of the VM to restore: otherwise it could get the files of another one.
    fn definition_of(
        &self,
        uses: &DomainUses,
        defined_xml: &dyn Fn(&str) -> Option<String>,
    ) -> Result<DomainUses, String> {
        if let Some(given) = self.given_domain.as_ref().filter(|given| **given != uses.name) {
            return Err(format!("it is of the domain {}, not of {given}", uses.name));
        }
        let Some(xml) = defined_xml(&uses.uuid) else { return Ok(DomainUses::default()) };
        let defined = domain_access::of_domain(&xml)
            .map_err(|why| format!("the domain with the UUID {} on this host: {why}", uses.uuid))?;
        let DomainUses { name, uuid, .. } = &defined;
        if *name != uses.name || *uuid != uses.uuid {
            return Err(format!("its domain {} has the UUID of the domain {name} of this host", uses.name));
        }
        let is_recorded = self.domain.as_ref().is_some_and(|domain| domain.name == *name && domain.uuid == *uuid);
        let is_given = self.given_domain.as_deref().unwrap_or(self.name.as_str()) == name;
        if !is_given && !is_recorded {
            return Err(format!(
                "it is of this host's domain {name}, which has not been protected here as {}; if it shall take its place: \
                 rekindle restore {name}, or first virsh undefine {name}",
                self.name
            ));
        }
        Ok(defined)
    }

    /// Checks a file of a domain. libvirt makes the file of the variables itself, with the domain's name.
    fn check_domain_file(&self, uses: &DomainUses, file: &UsedFile) -> Result<(), String> {
        let is_own_variables = file.element == "nvram"
            && file.path.parent() == Some(Path::new(VARIABLES_DIRECTORY))
            && [format!("{}_VARS.fd", uses.name), format!("{}_VARS.qcow2", uses.name)]
                .iter()
                .any(|name| file.path.file_name() == Some(name.as_ref()))
            && !file.path.is_symlink();
        if is_own_variables { Ok(()) } else { self.check_path(&format!("<{}>", file.element), &file.path) }
    }

    fn require_none(&self, problems: Vec<String>) -> Result<(), RecipeError> {
        match problems.is_empty() {
            true => Ok(()),
            false => Err(RecipeError::NotAllowed { name: self.name.to_string(), problems }),
        }
    }

    fn check_program(&self, path: &Path) -> Result<(), String> {
        match find_program(path) {
            Some(found) if self.known.programs.contains(&found) => Ok(()),
            _ => self.rules.check_program(path),
        }
    }

    fn check_path(&self, what: &str, path: &Path) -> Result<(), String> {
        self.rules.check_path(what, path, &|path| self.known.paths.contains(path))
    }

    fn check_argument(&self, text: &str, why: &str) -> Result<(), String> {
        if self.known.arguments.contains(text) { Ok(()) } else { self.rules.check_argument(text, why) }
    }

    /// Checks a definition that came with its checkpoint.
    fn problems_of_definition(&self, recipe: &Recipe) -> Vec<String> {
        let definition = &recipe.definition;
        let texts = option_texts(&definition.qemu_args);
        let mut problems: Vec<_> =
            texts.iter().filter_map(|text| self.check_argument(text, "a free argument of QEMU").err()).collect();
        for (what, path) in files_of(definition) {
            problems.extend(self.check_path(&what, &path).err());
        }
        // The names in a definition become parts of command lines and paths. An attached VM has no definition that could
        // be read from a file: its hardware has been checked.
        if problems.is_empty() && recipe.hardware.foreign.is_none() {
            let text = definition.to_toml().map_err(|e| e.to_string());
            let parsed = text.and_then(|text| {
                Definition::parse(&text, "/", "the definition in the checkpoint").map_err(|e| e.to_string())
            });
            match parsed {
                Ok(parsed) if parsed == *definition => {}
                Ok(_) => problems.push("its definition is not complete".into()),
                Err(why) => problems.push(why),
            }
        }
        if recipe.hardware.foreign.is_some() && !is_of_attached(recipe) {
            problems.push("its definition and its networks differ".into());
        }
        problems
    }

    fn problems_of_foreign(&self, hardware: &Hardware, machine: &ForeignMachine) -> Vec<String> {
        let problem = |access: HostAccess| match access {
            HostAccess::File { what, path } => self.check_path(&what, &path).err(),
            HostAccess::Argument { text, why } => self.check_argument(&text, &why).err(),
        };
        host_access::of_foreign(hardware, machine).into_iter().filter_map(problem).collect()
    }

    fn problems_of_overlays(&self, overlays: &[OverlayEpoch]) -> Vec<String> {
        let paths =
            overlays.iter().flat_map(|overlay| [("an image", &overlay.image), ("overlays", &overlay.directory)]);
        let is_known = |path: &Path| self.known.paths.iter().any(|known| is_of_image(path, known));
        let mut problems: Vec<_> =
            paths.filter_map(|(what, path)| self.rules.check_path(what, path, &is_known).err()).collect();
        let formats = overlays.iter().filter(|overlay| !["raw", "qcow2"].contains(&overlay.format.as_str()));
        problems.extend(formats.map(|overlay| format!("format {} of {}", overlay.format, overlay.image.display())));
        problems
    }
}

/// Returns whether `path` is the image `known`, or the directory of its overlays next to it.
fn is_of_image(path: &Path, known: &Path) -> bool {
    path == known || path.to_str().zip(known.to_str()).is_some_and(|(path, known)| path == format!("{known}.rekindle"))
}

/// Returns whether the taps of an attached VM are those of its definition.
fn is_of_attached(recipe: &Recipe) -> bool {
    use rekindle_qemu::command::NetBackend as Pinned;
    use rekindle_vm::definition::{NetBackend, TapPlace};
    let (definition, hardware) = (&recipe.definition, &recipe.hardware);
    let is_same = |(net, card): (&rekindle_vm::definition::Net, &rekindle_qemu::command::Net)| match (
        &net.backend,
        &card.backend,
    ) {
        (NetBackend::Tap { ifname, place, .. }, Pinned::Tap(tap)) => {
            let netns = match place {
                TapPlace::Netns { netns, .. } => Some(netns),
                TapPlace::Bridge { bridge } => {
                    return tap.netns.is_none() && tap.ifname == *ifname && is_plain_name(bridge);
                }
            };
            tap.ifname == *ifname && tap.netns.as_ref() == netns
        }
        (NetBackend::User { .. }, Pinned::User(_)) => true,
        _ => false,
    };
    definition.nets.len() == hardware.nets.len()
        && definition.nets.iter().zip(&hardware.nets).all(is_same)
        && definition.disks.is_empty()
        && definition.boot.is_none()
}

/// Returns the files and directories that a definition names.
fn files_of(definition: &Definition) -> Vec<(String, PathBuf)> {
    let mut files = Vec::new();
    let mut add = |what: &str, path: Option<&PathBuf>| files.extend(path.map(|path| (what.to_owned(), path.clone())));
    add("save_dir", definition.save_dir.as_ref());
    add("ram.dir", definition.ram.dir.as_ref());
    if let Some(boot) = &definition.boot {
        add("boot.kernel", Some(&boot.kernel));
        add("boot.initrd", boot.initrd.as_ref());
    }
    for disk in &definition.disks {
        add(&format!("disk {}", disk.id), Some(&disk.path));
        add(&format!("the redo log of disk {}", disk.id), disk.redo.as_ref());
    }
    files
}

impl KnownUses {
    fn add(&mut self, recipe: &Recipe) {
        self.add_definition(&recipe.definition);
        if let Some(machine) = &recipe.hardware.foreign {
            for access in host_access::of_foreign(&recipe.hardware, machine) {
                match access {
                    HostAccess::File { path, .. } => drop(self.paths.insert(path)),
                    HostAccess::Argument { text, .. } => drop(self.arguments.insert(text)),
                }
            }
        }
    }

    fn add_definition(&mut self, definition: &Definition) {
        self.programs.extend(find_program(&definition.qemu));
        self.arguments.extend(option_texts(&definition.qemu_args));
        self.paths.extend(files_of(definition).into_iter().map(|(_, path)| path));
        let images = definition.disks.iter().filter(|disk| disk.format == DiskFormat::Qcow2);
        self.paths.extend(images.flat_map(|disk| images_below(&disk.path)));
    }
}

impl AllowedRecipe {
    /// Returns the definition to use.
    pub(crate) fn definition(&self) -> &Definition {
        &self.definition
    }

    pub(crate) fn qemu(&self) -> Option<&Path> {
        self.qemu.as_deref()
    }

    /// Adapts `hardware` as [`Recipe::fit`] does.
    pub(crate) fn fit(&self, hardware: &mut Hardware) -> Result<(), Vec<String>> {
        self.recipe.fit(hardware, self.is_users_definition)
    }

    /// Returns the RAM blocks that are loaded on demand.
    pub(crate) fn ram_ids(&self) -> Vec<String> {
        self.recipe.ram_ids()
    }

    pub(crate) fn has_same_machine(&self, other: &Self) -> bool {
        self.recipe == other.recipe
    }
}

impl Deref for AllowedDomain {
    type Target = Recipe;

    fn deref(&self) -> &Recipe {
        &self.recipe
    }
}

impl AllowedDomain {
    pub(crate) fn xml(&self) -> &str {
        &self.xml
    }

    pub(crate) fn definition(&self) -> &Definition {
        &self.recipe.definition
    }

    /// Returns the machine. Its RAM is libvirt's: no file of this host.
    pub(crate) fn hardware(&self) -> Hardware {
        let mut hardware = self.recipe.hardware.clone();
        hardware.ram.path = PathBuf::new();
        hardware.disks.clear();
        hardware.nets.retain(|net| matches!(net.backend, rekindle_qemu::command::NetBackend::User(_)));
        hardware
    }
}

/// Records what this host runs as a VM, so that it can be restored here. Without this record, that may need further
/// configuration.
pub(crate) fn remember(host: &Host, name: &Name, recipe: &Recipe) {
    if let Err(e) = record(host, name, recipe) {
        tracing::warn!("{name}: what this host runs cannot be recorded: {e}");
    }
}

fn record(host: &Host, name: &Name, recipe: &Recipe) -> io::Result<()> {
    let path = host.run_machine(name);
    // The XML has passwords, which this file does not need.
    let domain = recipe.domain_xml().and_then(|xml| domain_access::of_domain(xml).ok());
    let files = domain.iter().flat_map(|domain| &domain.files);
    let qcow2_files = files.filter(|file| file.format.as_deref() == Some("qcow2"));
    let below: Vec<_> = qcow2_files.flat_map(|file| images_below(&file.path)).collect();
    let mut recipe = recipe.clone();
    if let Some(machine) = &mut recipe.hardware.foreign {
        machine.domain_xml = None;
    }
    let run = RunMachine { recipe, domain, images_below: below };
    if recorded(host, name).is_some_and(|recorded| recorded == run) {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        make_private(directory)?;
    }
    write_json(&path, &run)
}

fn recorded(host: &Host, name: &Name) -> Option<RunMachine> {
    serde_json::from_slice(&fs::read(host.run_machine(name)).ok()?).ok()
}
