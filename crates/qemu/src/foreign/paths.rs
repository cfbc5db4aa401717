//! Relative paths on a command line, made absolute: a QEMU that is started in another directory must find the same
//! files.

use super::words::Word;
use crate::options::Options;
use serde_json::{Map, Value};
use std::path::Path;

/// Options whose value is a file.
const FILES: &[&str] =
    &["kernel", "shim", "initrd", "dtb", "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "mtdblock", "sd"];
/// Options in whose value one of these keys names a file. The third field is the option's implied key.
const KEYS: &[(&str, &[&str], &str)] = &[
    ("drive", &["file", "file.filename"], "file"),
    ("blockdev", &["filename", "file.filename"], "driver"),
    ("smbios", &["file"], ""),
    ("fw_cfg", &["file"], "name"),
];

/// Returns the value of a kept option, with its relative paths made absolute from `cwd`.
///
/// # Errors
/// The path of a missing file: QEMU has changed its working directory since it started (`-daemonize`).
pub(super) fn absolute(word: &Word<'_>, cwd: &Path) -> Result<Option<String>, String> {
    let Some(value) = word.value else { return Ok(None) };
    if FILES.contains(&word.option) {
        return one(value, cwd).map(Some);
    }
    let keys = KEYS.iter().find(|(option, _, _)| *option == word.option);
    let Some((_, keys, implied)) = keys else { return Ok(Some(value.into())) };
    // QEMU reports values that cannot be parsed.
    let Ok(mut options) = Options::parse(value, implied) else { return Ok(Some(value.into())) };
    let mut changed = false;
    if let Options::Json(map) = &mut options {
        changed = nested(map, cwd)?;
    } else {
        for key in *keys {
            if let Some(path) = options.get(key) {
                let full = one(&path, cwd)?;
                changed |= full != path;
                options.set(key, &full);
            }
        }
    }
    Ok(Some(if changed { options.to_string() } else { value.into() }))
}

/// Makes the file names absolute in the options of a block node, including nested nodes.
fn nested(map: &mut Map<String, Value>, cwd: &Path) -> Result<bool, String> {
    let mut changed = false;
    for (key, value) in map.iter_mut() {
        match value {
            Value::String(path) if key == "filename" => {
                let full = one(path, cwd)?;
                changed |= full != *path;
                *path = full;
            }
            Value::Object(inner) => changed |= nested(inner, cwd)?,
            _ => {}
        }
    }
    Ok(changed)
}

fn one(path: &str, cwd: &Path) -> Result<String, String> {
    // A protocol prefix (`nbd:...`, `json:...`) means that this is no path.
    let is_protocol = path.split(['/', '\\']).next().is_some_and(|first| first.contains(':'));
    if path.is_empty() || path.starts_with('/') || is_protocol {
        return Ok(path.into());
    }
    let full = cwd.join(path);
    if full.exists() { Ok(full.to_string_lossy().into_owned()) } else { Err(path.into()) }
}

#[cfg(test)]
mod tests {
    use super::super::words::Fate;
    use super::*;

    fn made(option: &str, value: &str, cwd: &Path) -> Result<String, String> {
        let word = Word { option, value: Some(value), fate: Fate::Keep };
        absolute(&word, cwd).map(Option::unwrap)
    }

    #[test]
    fn relative_paths_are_made_absolute_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let cwd = directory.path();
        std::fs::write(cwd.join("a,b"), "").unwrap();
        let full = cwd.join("a,b").to_string_lossy().into_owned();
        assert_eq!(made("kernel", "a,b", cwd).unwrap(), full);
        assert_eq!(made("append", "a,b", cwd).unwrap(), "a,b");
        let escaped = full.replace(',', ",,");
        assert_eq!(made("drive", "a,,b,if=none", cwd).unwrap(), format!("file={escaped},if=none"));
        assert_eq!(made("drive", "file=/x,if=none", cwd).unwrap(), "file=/x,if=none");
        assert_eq!(made("drive", "nbd:h:1,if=none", cwd).unwrap(), "nbd:h:1,if=none");
        let json = r#"{"driver":"qcow2","file":{"driver":"file","filename":"a,b"}}"#;
        let made_of_json = made("blockdev", json, cwd).unwrap();
        assert!(made_of_json.contains(&format!(r#""filename":"{full}""#)), "{made_of_json}");
        assert_eq!(made("cdrom", "gone", cwd).unwrap_err(), "gone");
    }
}
