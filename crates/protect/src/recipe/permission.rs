//! Whether this host may run what a recipe describes. The only way to an [`AllowedRecipe`] or an [`AllowedDomain`], which a
//! restore needs.
//!
//! A recipe comes from a store or from another host, so nothing in it is trusted. It may use
//!
//! - what the operator names for this restore (`--definition`, `--qemu`), or in a definition of the VM on this host;
//! - what this host has run as the same VM before, which [`remember`] has recorded;
//! - what [`RestoreRules`] allows on this host.

use super::{Recipe, RecipeError};
use rekindle_libvirt::host_access as domain_access;
use rekindle_qemu::command::{ForeignMachine, Hardware};
use rekindle_qemu::host_access::{self, HostAccess};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::host::{Host, make_private};
use rekindle_vm::overlays::OverlayEpoch;
use rekindle_vm::restore_rules::{RestoreRules, find_program, option_texts};
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::state::State;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What checkpoints of one VM may use of this host.
#[derive(Debug)]
pub(crate) struct Permission {
    name: Name,
    rules: RestoreRules,
    /// A definition and a QEMU that the operator has named.
    given: Option<Definition>,
    qemu: Option<PathBuf>,
    known: KnownUses,
}

/// What the operator of this host names for a restore.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OperatorChoice<'a> {
    /// The definition to use instead of the recipe's.
    pub(crate) definition: Option<&'a Definition>,
    /// The VM's definition on this host, which is not used, but whose files are allowed.
    pub(crate) local_definition: Option<&'a Definition>,
    pub(crate) qemu: Option<&'a Path>,
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
        if let Some(recipe) = recorded(host, name) {
            known.add(&recipe);
        }
        let state = State::read(&RunDir::new(&host.root, name.as_str())).ok().flatten();
        let prepared = state.as_ref().and_then(|state| state.prepared.as_ref());
        // The options of the preparation still apply.
        let given = choice.definition.cloned().or_else(|| prepared.and_then(|prepared| prepared.given.clone()));
        let qemu = choice.qemu.map(Path::to_owned).or_else(|| prepared.and_then(|prepared| prepared.qemu.clone()));
        for definition in given.as_ref().into_iter().chain(choice.local_definition) {
            known.add_definition(definition);
        }
        Arc::new(Self { name: name.clone(), rules: host.restore_rules.clone(), given, qemu, known })
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
        problems.extend(self.problems_of_overlays(overlays));
        self.require_none(problems)?;
        let definition = Definition { name: self.name.clone(), ..definition.clone() };
        Ok(AllowedRecipe { recipe, definition, is_users_definition: self.given.is_some(), qemu: self.qemu.clone() })
    }

    /// Checks the recipe of a domain that libvirt is to run; `known_xml`: this host's own definition of it. `None`: the
    /// recipe is not of a domain.
    pub(crate) fn allow_domain(
        &self,
        recipe: Recipe,
        overlays: &[OverlayEpoch],
        known_xml: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<AllowedDomain>, RecipeError> {
        let Some(xml) = recipe.domain_xml().map(str::to_owned) else { return Ok(None) };
        let mut problems: Vec<String> = Vec::new();
        // `qemu-img` is started next to it.
        problems.extend(self.check_program(&recipe.definition.qemu).err());
        let unreadable = |why: String| vec![format!("libvirt's description of the domain: {why}")];
        match domain_access::of_domain(&xml) {
            Err(why) => problems.extend(unreadable(why)),
            Ok(uses) => {
                let defined = known_xml(&uses.uuid).and_then(|known| domain_access::of_domain(&known).ok());
                let (known_files, known_elements) =
                    defined.map(|defined| (defined.files, defined.elements)).unwrap_or_default();
                problems.extend(uses.emulator.iter().filter_map(|emulator| self.check_program(emulator).err()));
                for file in uses.files.iter().filter(|file| !known_files.contains(file)) {
                    problems.extend(self.check_path(&format!("<{}>", file.element), &file.path).err());
                }
                for element in uses.elements.iter().filter(|element| !known_elements.contains(element)) {
                    problems.extend(self.rules.check_element(&element.name, &element.why).err());
                }
            }
        }
        for path in [&recipe.definition.save_dir, &recipe.definition.ram.dir].into_iter().flatten() {
            problems.extend(self.check_path("a directory of the definition", path).err());
        }
        problems.extend(self.problems_of_overlays(overlays));
        self.require_none(problems)?;
        Ok(Some(AllowedDomain { recipe, xml }))
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
        if self.known.paths.contains(path) { Ok(()) } else { self.rules.check_path(what, path) }
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
        let mut problems: Vec<_> = paths
            .filter(|(_, path)| !self.known.paths.iter().any(|known| is_of_image(path, known)))
            .filter_map(|(what, path)| self.check_path(what, path).err())
            .collect();
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
                    return tap.netns.is_none() && tap.ifname == *ifname && !bridge.starts_with('-');
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

/// Records what this host runs as the VM `name`, so that it can be restored here.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn remember(host: &Host, name: &Name, recipe: &Recipe) -> io::Result<()> {
    let path = host.run_machine(name);
    if recorded(host, name).is_some_and(|recorded| recorded == *recipe) {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        make_private(directory)?;
    }
    // The XML has passwords, which this file does not need.
    let mut recipe = recipe.clone();
    if let Some(machine) = &mut recipe.hardware.foreign {
        machine.domain_xml = None;
    }
    write_json(&path, &recipe)
}

fn recorded(host: &Host, name: &Name) -> Option<Recipe> {
    serde_json::from_slice(&fs::read(host.run_machine(name)).ok()?).ok()
}
