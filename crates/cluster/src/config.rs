//! Commands for the cluster manager's configuration, with the VM's utilization, so that it is placed on a node with
//! enough room.

use rekindle_vm::definition::Definition;
use std::path::Path;

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

/// Name, interval (s), timeout (s), and check level of each operation of the resource.
const OPERATIONS: [(&str, u32, u32, u32); 6] = [
    ("start", 0, 120, 0),
    ("stop", 0, 120, 0),
    ("migrate_to", 0, 600, 0),
    ("migrate_from", 0, 60, 0),
    ("monitor", 10, 30, 0),
    ("monitor", 60, 30, 10),
];

/// After three failures on a node, the cluster uses another node; failures expire after a minute.
const META_ATTRIBUTES: &str = "allow-migrate=true migration-threshold=3 failure-timeout=60s";

/// Quotes a word for a shell command.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Returns two alternative sets of commands: one for `crm` (crmsh), one for `pcs`. `parameters` are the resource
/// parameters in addition to the definition.
#[must_use]
pub fn lines(definition: &Definition, file: &Path, parameters: &[(&str, String)]) -> String {
    let Utilization { memory, vcpus } = Utilization::of(definition);
    let name = definition.name.as_str();
    let file = ("definition", file.display().to_string());
    let given: Vec<_> =
        std::iter::once(&file).chain(parameters).map(|(key, value)| quoted(&format!("{key}={value}"))).collect();
    let given = given.join(" ");
    // A store on a server needs the node's certificate.
    let store = parameters.iter().find(|(key, _)| *key == "store").map(|(_, url)| quoted(url)).unwrap_or_default();
    let tls = parameters.iter().filter(|(key, _)| ["cert", "key", "ca"].contains(key));
    let store = tls.fold(store, |line, (key, file)| format!("{line} --{key} {}", quoted(file)));
    let operations = |word: &str, level: &str| {
        let one = |(name, interval, timeout, depth): &(&str, u32, u32, u32)| {
            let depth = if *depth > 0 { format!(" {level}={depth}") } else { String::new() };
            format!("{word}{name} interval={interval}s timeout={timeout}s{depth}")
        };
        OPERATIONS.iter().map(one).collect::<Vec<_>>()
    };
    let crm = operations("op ", "op_params OCF_CHECK_LEVEL").join(" \\\n    ");
    let pcs = operations("", "OCF_CHECK_LEVEL").join(" \\\n    ");
    format!(
        "# Set each node's capacity for guests once, in MiB and processors, e.g. 60 GiB and 16:\n\
         #   crm node utilization NODE set memory 61440 && crm node utilization NODE set vcpus 16\n\
         #   pcs node utilization NODE memory=61440 vcpus=16\n\
         # Place by capacity, do not move running VMs, and repeat a failed start, since a store may be unreachable:\n\
         #   crm configure property placement-strategy=balanced start-failure-is-fatal=false\n\
         #   crm configure rsc_defaults resource-stickiness=100\n\
         #   pcs property set placement-strategy=balanced start-failure-is-fatal=false\n\
         #   pcs resource defaults update resource-stickiness=100\n\
         # Create the store once, on one node:\n\
         #   rekindle store init {store}\n\
         \n# crmsh\n\
         crm configure primitive {name} ocf:rekindle:vm \\\n    params {given} \\\n    {crm} \\\n    \
         utilization memory={memory} vcpus={vcpus} \\\n    meta {META_ATTRIBUTES}\n\
         \n# pcs\n\
         pcs resource create {name} ocf:rekindle:vm {given} \\\n    op {pcs} \\\n    \
         meta {META_ATTRIBUTES}\n\
         pcs resource utilization {name} memory={memory} vcpus={vcpus}\n"
    )
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
        let text = lines(
            &definition,
            Path::new("/etc/rekindle/my web.toml"),
            &[("store", "tls://s:7001/web".into()), ("cert", "/c.pem".into())],
        );
        for wanted in [
            "crm configure primitive web ocf:rekindle:vm \\\n    params 'definition=/etc/rekindle/my web.toml' store=tls://s:7001/web cert=/c.pem \\\n",
            "op monitor interval=60s timeout=30s op_params OCF_CHECK_LEVEL=10 \\\n    utilization memory=1536 vcpus=3 \\\n    meta allow-migrate=true migration-threshold=3 failure-timeout=60s\n",
            "migrate_to interval=0s timeout=600s \\\n    migrate_from interval=0s timeout=60s \\\n",
            "pcs resource utilization web memory=1536 vcpus=3",
            "#   rekindle store init tls://s:7001/web --cert /c.pem\n",
        ] {
            assert!(text.contains(wanted), "{wanted} is not in:\n{text}");
        }
    }
}
