//! The files of the host that the QEMU of a machine of Rekindle opens by itself, so that only they need exist for it.
//!
//! Each absolute path in the value of an option that takes files counts. So this is only for arguments that the owner of this
//! host has written, not for those of an attached QEMU, which may come from a store
//! ([`host_access`](crate::host_access)).

use crate::command::Hardware;
use crate::options::Options;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Options whose files QEMU writes, unless they are read-only.
const WRITTEN: [&str; 15] = [
    "drive", "blockdev", "hda", "hdb", "hdc", "hdd", "fda", "fdb", "pflash", "mtdblock", "sd", "chardev", "serial",
    "object", "tpmdev",
];
/// Options whose files QEMU reads. Values of others, such as the kernel's command line, are no files of the host.
const READ: [&str; 22] = [
    "kernel",
    "shim",
    "initrd",
    "dtb",
    "bios",
    "L",
    "k",
    "option-rom",
    "cdrom",
    "acpitable",
    "smbios",
    "fw_cfg",
    "boot",
    "device",
    "global",
    "machine",
    "M",
    "fsdev",
    "virtfs",
    "netdev",
    "readconfig",
    "plugin",
];
/// Keys that make a file read-only.
const READ_ONLY: [&str; 2] = ["readonly", "read-only"];

/// A file that a QEMU opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedFile {
    /// An absolute path. The file may be missing.
    pub path: PathBuf,
    /// Whether QEMU writes to it.
    pub is_written: bool,
}

/// Returns the files that the QEMU of `hardware` opens, except RAM ([`Hardware::ram_files`]), the sockets of disk servers, and
/// the files that images name.
#[must_use]
pub fn of(hardware: &Hardware) -> Vec<UsedFile> {
    let read = |path: &Path| UsedFile { path: path.to_owned(), is_written: false };
    let mut files = Vec::new();
    if let Some(boot) = &hardware.boot {
        files.extend([Some(&boot.kernel), boot.initrd.as_ref()].into_iter().flatten().map(|path| read(path)));
    }
    let own = hardware.disks.iter().filter(|disk| !disk.server);
    files.extend(own.map(|disk| UsedFile { path: disk.path.clone(), is_written: !disk.readonly }));
    files.extend(named_in(&hardware.extra));
    files
}

/// Returns the files that QEMU's arguments name.
fn named_in(arguments: &[String]) -> Vec<UsedFile> {
    let mut files = Vec::new();
    let mut option = "";
    for argument in arguments {
        if let Some(name) = argument.strip_prefix('-') {
            option = name.trim_start_matches('-');
            continue;
        }
        if !WRITTEN.contains(&option) && !READ.contains(&option) {
            continue;
        }
        let pairs = pairs(argument);
        let is_read_only = pairs.iter().any(|(key, value)| is_read_only(key, value));
        // Of objects, only memory is written; others read keys.
        let is_written = match option {
            "object" => argument.contains("memory-backend-file"),
            _ => WRITTEN.contains(&option),
        };
        let paths = pairs.iter().flat_map(|(_, value)| paths(value));
        files.extend(paths.map(|path| UsedFile { path, is_written: is_written && !is_read_only }));
    }
    files
}

fn is_read_only(key: &str, value: &str) -> bool {
    let key = key.rsplit('.').next().unwrap_or_default();
    READ_ONLY.contains(&key) && ["on", "true", "yes"].contains(&value) || key == "media" && value == "cdrom"
}

/// Returns keys and values; those in an object of JSON with the keys of the objects around it.
fn pairs(argument: &str) -> Vec<(String, String)> {
    match Options::parse(argument, "") {
        Ok(Options::Json(object)) => flat("", &Value::Object(object)),
        Ok(Options::Pairs(pairs)) => {
            let whole = ("".to_owned(), argument.to_owned());
            let with_value = |(key, value): (String, Option<String>)| match value {
                Some(value) => (key, value),
                None => (String::new(), key),
            };
            pairs.into_iter().map(with_value).chain([whole]).collect()
        }
        Err(_) => vec![(String::new(), argument.to_owned())],
    }
}

fn flat(key: &str, value: &Value) -> Vec<(String, String)> {
    let inner = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Object(object) => object.iter().flat_map(|(name, value)| flat(&inner(name), value)).collect(),
        Value::Array(values) => values.iter().flat_map(|value| flat(key, value)).collect(),
        Value::String(text) => vec![(key.to_owned(), text.clone())],
        other => vec![(key.to_owned(), other.to_string())],
    }
}

/// Returns the paths of a value: the whole value, or several after colons (`-acpitable data=/a:/b`, `unix:/a`).
fn paths(value: &str) -> Vec<PathBuf> {
    let whole = value.starts_with('/').then(|| PathBuf::from(value));
    let parts = value.split(':').filter(|part| part.starts_with('/') && *part != value).map(PathBuf::from);
    whole.into_iter().chain(parts).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::command::{Boot, Disk};

    fn disk(path: &str, readonly: bool, server: bool) -> Disk {
        Disk {
            id: "root".into(),
            path: path.into(),
            format: "raw".into(),
            readonly,
            cache: "none".into(),
            serial: None,
            server,
            redo: None,
            attic_keep_ms: None,
            bps: None,
            iops: None,
        }
    }

    fn described(files: &[UsedFile]) -> Vec<String> {
        let describe =
            |file: &UsedFile| format!("{} {}", if file.is_written { "rw" } else { "r" }, file.path.display());
        files.iter().map(describe).collect()
    }

    #[test]
    fn a_machine_uses_its_kernel_and_the_disks_that_no_server_serves() {
        let hardware = Hardware {
            boot: Some(Boot {
                kernel: "/b/vmlinuz".into(),
                initrd: Some("/b/initrd".into()),
                append: "/not/this".into(),
            }),
            disks: vec![disk("/i/a", false, false), disk("/i/b", true, false), disk("/i/served", false, true)],
            extra: vec!["-device".into(), "virtio-net-pci,romfile=/r/om".into()],
            ..Hardware::bare(1 << 20)
        };
        assert_eq!(described(&of(&hardware)), ["r /b/vmlinuz", "r /b/initrd", "rw /i/a", "r /i/b", "r /r/om"]);
    }

    #[test]
    fn each_path_in_arguments_counts() {
        for (arguments, expected) in [
            (&["-drive", "file=/i/x,format=raw"][..], &["rw /i/x"][..]),
            (&["-drive", "file=/i/x,format=qcow2,readonly=on"], &["r /i/x"]),
            (&["-drive", "file=/a,,b,if=none"], &["rw /a,b"]),
            (&["-drive", "file=/c.iso,media=cdrom"], &["r /c.iso"]),
            (&["-object", "secret,id=s,file=/key"], &["r /key"]),
            (&["-kernel", "/k"], &["r /k"]),
            (&["-cdrom", "/c.iso"], &["r /c.iso"]),
            (&["-acpitable", "data=/a:/b"], &["r /a:/b", "r /a", "r /b"]),
            (&["-serial", "unix:/s,server=on"], &["rw /s"]),
            (&["-chardev", "file,id=c,path=/log"], &["rw /log"]),
            (&["-object", "memory-backend-file,id=m,mem-path=/m,size=1M"], &["rw /m"]),
            (&["-nodefaults", "-hda", "/h"], &["rw /h"]),
            (
                &["-blockdev", r#"{"driver":"qcow2","read-only":true,"file":{"driver":"file","filename":"/i/q"}}"#],
                &["r /i/q"],
            ),
            (
                &["-blockdev", "driver=file,filename=/i/q,node-name=f", "-blockdev", "driver=qcow2,file=f,node-name=q"],
                &["rw /i/q"],
            ),
        ] {
            let arguments: Vec<_> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            let found: Vec<_> = described(&named_in(&arguments));
            for path in expected {
                assert!(found.contains(&(*path).to_owned()), "{arguments:?}: {found:?}");
            }
        }
    }

    #[test]
    fn values_that_are_not_files_of_the_host_do_not_count() {
        for arguments in [["-append", "root=/dev/vda"], ["-name", "/x"], ["-m", "1G"], ["-device", "VGA"]] {
            let arguments: Vec<_> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            assert_eq!(named_in(&arguments), [], "{arguments:?}");
        }
    }
}
