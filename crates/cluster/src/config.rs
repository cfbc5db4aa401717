//! Commands for the cluster manager's configuration, with the VM's utilization, so that it is placed on a node with
//! enough room.

use crate::resource::SYSTEM_URI;
use rekindle_kernel::libvirt_client::{Connection, LibvirtError};
use rekindle_kernel::patience::answer_within;
use rekindle_vm::definition::Definition;
use std::path::Path;
use std::time::Duration;

/// How long libvirt may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The capacity that a VM takes from a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Utilization {
    /// The guest's RAM in MiB. QEMU itself takes about 100 MiB more, to be left out of a node's capacity.
    pub memory: u64,
    pub vcpus: u8,
}

impl Utilization {
    #[must_use]
    pub fn of(definition: &Definition) -> Self {
        Self { memory: definition.memory.as_u64().div_ceil(1 << 20), vcpus: definition.vcpus }
    }
}

/// An operation of the resource.
struct Operation {
    name: &'static str,
    interval_s: u32,
    timeout_s: u32,
    /// `OCF_CHECK_LEVEL`; 0 for the default.
    check_level: u32,
}

impl Operation {
    const fn new(name: &'static str, timeout_s: u32) -> Self {
        Self { name, interval_s: 0, timeout_s, check_level: 0 }
    }
}

const OPERATIONS: [Operation; 6] = [
    Operation::new("start", 120),
    Operation::new("stop", 120),
    Operation::new("migrate_to", 600),
    Operation::new("migrate_from", 60),
    Operation { interval_s: 10, ..Operation::new("monitor", 30) },
    Operation { interval_s: 60, check_level: 10, ..Operation::new("monitor", 30) },
];

/// After three failures on a node, the cluster uses another node; failures expire after a minute.
const META_ATTRIBUTES: &str = "migration-threshold=3 failure-timeout=60s";

/// What a resource is on each node.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Path of a definition.
    Definition(&'a Path),
    /// libvirt's name of a domain.
    Domain(&'a str),
}

/// A resource to configure.
#[derive(Debug, Clone, Copy)]
pub struct Configured<'a> {
    pub name: &'a str,
    pub source: Source<'a>,
    /// `None` if it is not known.
    pub utilization: Option<Utilization>,
}

impl Configured<'_> {
    /// The parameter that names the source.
    fn source_parameter(&self) -> (&'static str, String) {
        match self.source {
            Source::Definition(file) => ("definition", file.display().to_string()),
            Source::Domain(name) => ("domain", name.to_owned()),
        }
    }

    /// Returns whether it can be moved while it runs.
    fn can_move(&self) -> bool {
        matches!(self.source, Source::Definition(_))
    }
}

/// Checks that this host has libvirt. A daemon that does not answer is only logged, because it may answer later.
///
/// # Errors
/// [`LibvirtError::NotInstalled`].
pub fn check_libvirt() -> Result<(), LibvirtError> {
    let why = match answer_within(ANSWER_TIMEOUT, || Connection::open(Some(SYSTEM_URI)).map(drop)) {
        Some(Ok(())) => return Ok(()),
        Some(Err(e @ LibvirtError::NotInstalled(_))) => return Err(e),
        Some(Err(e)) => e.to_string(),
        None => format!("no answer for {} s", ANSWER_TIMEOUT.as_secs()),
    };
    tracing::warn!("libvirt does not answer: {why}");
    Ok(())
}

/// Quotes a word for a shell command.
fn quote(text: &str) -> String {
    let needs_no_quotes = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(needs_no_quotes) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Returns two alternative sets of commands: one for `crm` (crmsh), one for `pcs`. `parameters` are the resource
/// parameters in addition to its source.
#[must_use]
pub fn configuration_commands(configured: &Configured<'_>, parameters: &[(&str, String)]) -> String {
    let name = configured.name;
    let source = configured.source_parameter();
    let parameter_words: Vec<_> =
        std::iter::once(&source).chain(parameters).map(|(key, value)| quote(&format!("{key}={value}"))).collect();
    let parameter_words = parameter_words.join(" ");
    let store = store_arguments(parameters);
    let can_move = configured.can_move();
    let crm_operations = operation_lines(can_move, "op ", "op_params OCF_CHECK_LEVEL");
    let pcs_operations = operation_lines(can_move, "", "OCF_CHECK_LEVEL");
    let meta_attributes = format!("allow-migrate={can_move} {META_ATTRIBUTES}");
    let (crm_utilization, pcs_utilization) = match configured.utilization {
        Some(Utilization { memory, vcpus }) => (
            format!("    utilization memory={memory} vcpus={vcpus} \\\n"),
            format!("pcs resource utilization {name} memory={memory} vcpus={vcpus}\n"),
        ),
        None => (
            String::new(),
            format!(
                "# Set its utilization (virsh dominfo prints the memory in KiB; write MiB):\n\
                 #   crm resource utilization {name} set memory MIB && crm resource utilization {name} set vcpus N\n\
                 #   pcs resource utilization {name} memory=MIB vcpus=N\n"
            ),
        ),
    };
    format!(
        "# Set each node's capacity for guests once, in MiB and processors, e.g. 60 GiB and 16:\n\
         #   crm node utilization NODE set memory 61440 && crm node utilization NODE set vcpus 16\n\
         #   pcs node utilization NODE memory=61440 vcpus=16\n\
         # Place by capacity, do not move running VMs, repeat a failed start, since a store may be unreachable, and start\n\
         # several VMs at the same time also on a busy node:\n\
         #   crm configure property placement-strategy=balanced start-failure-is-fatal=false load-threshold=400%\n\
         #   crm configure rsc_defaults resource-stickiness=100\n\
         #   pcs property set placement-strategy=balanced start-failure-is-fatal=false load-threshold=400%\n\
         #   pcs resource defaults update resource-stickiness=100\n\
         # Create the store once, on one node:\n\
         #   rekindle store init {store}\n\
         \n# crmsh\n\
         crm configure primitive {name} ocf:rekindle:vm \\\n    params {parameter_words} \\\n    \
         {crm_operations} \\\n{crm_utilization}    meta {meta_attributes}\n\
         \n# pcs\n\
         pcs resource create {name} ocf:rekindle:vm {parameter_words} \\\n    op {pcs_operations} \\\n    \
         meta {meta_attributes}\n\
         {pcs_utilization}"
    )
}

/// Returns the store and the options of `rekindle store init`: an object store needs its variables.
fn store_arguments(parameters: &[(&str, String)]) -> String {
    let find = |name: &str| parameters.iter().find(|(key, _)| *key == name).map(|(_, value)| quote(value));
    let store = find("store").unwrap_or_default();
    find("environment_file").map_or_else(|| store.clone(), |file| format!("{store} --environment-file {file}"))
}

/// Returns a line for each of [`OPERATIONS`], which begins with `prefix`; without those of a move, unless `can_move`.
/// `level_key` is the name of the check level.
fn operation_lines(can_move: bool, prefix: &str, level_key: &str) -> String {
    let line = |operation: &Operation| {
        let Operation { name, interval_s, timeout_s, check_level } = operation;
        let level = if *check_level > 0 { format!(" {level_key}={check_level}") } else { String::new() };
        format!("{prefix}{name} interval={interval_s}s timeout={timeout_s}s{level}")
    };
    let operations = OPERATIONS.iter().filter(|operation| can_move || !operation.name.starts_with("migrate_"));
    operations.map(line).collect::<Vec<_>>().join(" \\\n    ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn utilization_and_parameters_come_from_the_definition() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("vmlinuz"), "").unwrap();
        let text = "name = \"web\"\nmemory = \"1536M\"\nvcpus = 3\n[boot]\nkernel = \"vmlinuz\"\n";
        let definition = Definition::parse(text, folder.path(), "web.toml").unwrap();
        assert_eq!(Utilization::of(&definition), Utilization { memory: 1536, vcpus: 3 });
        let parameters = [("store", "s3://b/web".into()), ("environment_file", "/s3.env".into())];
        let source = Source::Definition(Path::new("/etc/rekindle/my web.toml"));
        let own = Configured { name: "web", source, utilization: Some(Utilization::of(&definition)) };
        let text = configuration_commands(&own, &parameters);
        for part in [
            "crm configure primitive web ocf:rekindle:vm \\\n    params 'definition=/etc/rekindle/my web.toml' store=s3://b/web environment_file=/s3.env \\\n",
            "op monitor interval=60s timeout=30s op_params OCF_CHECK_LEVEL=10 \\\n    utilization memory=1536 vcpus=3 \\\n    meta allow-migrate=true migration-threshold=3 failure-timeout=60s\n",
            "migrate_to interval=0s timeout=600s \\\n    migrate_from interval=0s timeout=60s \\\n",
            "pcs resource utilization web memory=1536 vcpus=3",
            "#   rekindle store init s3://b/web --environment-file /s3.env\n",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }

    #[test]
    fn a_domain_is_not_moved_while_it_runs() {
        let domain = Configured { name: "web", source: Source::Domain("Web Server"), utilization: None };
        let text = configuration_commands(&domain, &[("store", "/s".into())]);
        for part in [
            "crm configure primitive web ocf:rekindle:vm \\\n    params 'domain=Web Server' store=/s \\\n",
            "op_params OCF_CHECK_LEVEL=10 \\\n    meta allow-migrate=false migration-threshold=3 failure-timeout=60s\n",
            "#   pcs resource utilization web memory=MIB vcpus=N\n",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(!text.contains("migrate_"), "{text}");
    }
}
