//! Relative paths on a command line, rewritten absolute: a QEMU that is started in another directory must find the same
//! files.

use super::carry_rules::CommandOption;
use crate::options::Options;
use serde_json::{Map, Value};
use std::path::Path;

/// Options whose value is a file name.
const FILE_OPTIONS: &[&str] =
    &["kernel", "shim", "initrd", "dtb", "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "mtdblock", "sd"];

/// An option whose value has file names at some keys.
struct OptionWithFiles {
    option: &'static str,
    /// Keys that name a file.
    file_keys: &'static [&'static str],
    /// The key of a first item without a key; empty if there is none.
    implied_key: &'static str,
}

const OPTIONS_WITH_FILES: [OptionWithFiles; 4] = [
    OptionWithFiles { option: "drive", file_keys: &["file", "file.filename"], implied_key: "file" },
    OptionWithFiles { option: "blockdev", file_keys: &["filename", "file.filename"], implied_key: "driver" },
    OptionWithFiles { option: "smbios", file_keys: &["file"], implied_key: "" },
    OptionWithFiles { option: "fw_cfg", file_keys: &["file"], implied_key: "name" },
];

/// Returns the value of an option, with its relative paths rewritten absolute from `cwd`. `None` for an option without a
/// value.
///
/// # Errors
/// The path of a missing file: QEMU has changed its working directory since it started (`-daemonize`).
pub(crate) fn with_absolute_paths(option: &CommandOption<'_>, cwd: &Path) -> Result<Option<String>, String> {
    let Some(value) = option.value else { return Ok(None) };
    if FILE_OPTIONS.contains(&option.name) {
        return absolute(value, cwd).map(Some);
    }
    let unchanged = || Ok(Some(value.into()));
    let Some(rule) = OPTIONS_WITH_FILES.iter().find(|rule| rule.option == option.name) else { return unchanged() };
    // QEMU reports values that cannot be parsed.
    let Ok(mut options) = Options::parse(value, rule.implied_key) else { return unchanged() };
    let mut is_changed = false;
    if let Options::Json(node) = &mut options {
        is_changed = make_node_absolute(node, cwd)?;
    } else {
        for key in rule.file_keys {
            if let Some(path) = options.get(key) {
                let absolute_path = absolute(&path, cwd)?;
                is_changed |= absolute_path != path;
                options.set(key, &absolute_path);
            }
        }
    }
    if is_changed { Ok(Some(options.to_string())) } else { unchanged() }
}

/// Makes the file names absolute in the options of a block node, including nested nodes. Returns whether one was
/// relative.
fn make_node_absolute(node: &mut Map<String, Value>, cwd: &Path) -> Result<bool, String> {
    let mut is_changed = false;
    for (key, value) in node.iter_mut() {
        match value {
            Value::String(path) if key == "filename" => {
                let absolute_path = absolute(path, cwd)?;
                is_changed |= absolute_path != *path;
                *path = absolute_path;
            }
            Value::Object(inner_node) => is_changed |= make_node_absolute(inner_node, cwd)?,
            _ => {}
        }
    }
    Ok(is_changed)
}

/// Returns the absolute form of `path`. The error is the path of a missing file.
fn absolute(path: &str, cwd: &Path) -> Result<String, String> {
    // A protocol prefix (`nbd:...`, `json:...`) means that this is no path.
    let is_protocol = path.split(['/', '\\']).next().is_some_and(|first| first.contains(':'));
    if path.is_empty() || path.starts_with('/') || is_protocol {
        return Ok(path.into());
    }
    let joined = cwd.join(path);
    if joined.exists() { Ok(joined.to_string_lossy().into_owned()) } else { Err(path.into()) }
}

#[cfg(test)]
mod tests {
    use super::super::carry_rules::CarryRule;
    use super::*;

    fn rewritten(name: &str, value: &str, cwd: &Path) -> Result<String, String> {
        let option = CommandOption { name, value: Some(value), rule: CarryRule::Keep };
        with_absolute_paths(&option, cwd).map(Option::unwrap)
    }

    #[test]
    fn relative_paths_are_made_absolute_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let cwd = directory.path();
        std::fs::write(cwd.join("a,b"), "").unwrap();
        let absolute_path = cwd.join("a,b").to_string_lossy().into_owned();
        assert_eq!(rewritten("kernel", "a,b", cwd).unwrap(), absolute_path);
        assert_eq!(rewritten("append", "a,b", cwd).unwrap(), "a,b");
        let escaped = absolute_path.replace(',', ",,");
        assert_eq!(rewritten("drive", "a,,b,if=none", cwd).unwrap(), format!("file={escaped},if=none"));
        assert_eq!(rewritten("drive", "file=/x,if=none", cwd).unwrap(), "file=/x,if=none");
        assert_eq!(rewritten("drive", "nbd:h:1,if=none", cwd).unwrap(), "nbd:h:1,if=none");
        let json = r#"{"driver":"qcow2","file":{"driver":"file","filename":"a,b"}}"#;
        let rewritten_json = rewritten("blockdev", json, cwd).unwrap();
        assert!(rewritten_json.contains(&format!(r#""filename":"{absolute_path}""#)), "{rewritten_json}");
        assert_eq!(rewritten("cdrom", "gone", cwd).unwrap_err(), "gone");
    }
}
