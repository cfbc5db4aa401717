//! The keys that a definition may have, and hints for unknown keys and values: the nearest known one.

/// Every key, by section. The getters may only read these keys, and hints at unknown keys are chosen from them.
pub(super) const SECTIONS: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "name",
            "memory",
            "vcpus",
            "accel",
            "machine",
            "cpu",
            "qemu",
            "probe",
            "shutdown_timeout",
            "on_reboot",
            "on_crash",
            "save_dir",
            "qemu_args",
            "ram",
            "boot",
            "devices",
            "phase",
            "disk",
            "net",
        ],
    ),
    ("ram", &["dir", "prealloc"]),
    ("boot", &["kernel", "initrd", "append"]),
    ("devices", &["vga", "agent", "rng", "vmgenid"]),
    ("phase", &["save", "healthy"]),
    ("disk", &["id", "path", "format", "readonly", "cache", "serial", "server", "redo", "attic_keep", "bps", "iops"]),
    ("net", &["id", "mac", "kind", "forward", "bridge", "netns", "address", "ifname", "queues", "vhost"]),
];

/// Returns every key of a section.
pub(super) fn keys_of(section: &str) -> &'static [&'static str] {
    SECTIONS.iter().find(|(name, _)| *name == section).map_or(&[], |(_, keys)| keys)
}

/// Returns a hint for an unknown key: the section that it belongs to, or the nearest known key.
pub(super) fn hint_for_unknown(section: &str, key: &str) -> String {
    let section_of = |name: &str| match name {
        "" => "at the top, above the first [section]".to_owned(),
        "disk" | "net" => format!("under [[{name}]]"),
        _ => format!("under [{name}]"),
    };
    if let Some((name, _)) = SECTIONS.iter().find(|(_, keys)| keys.contains(&key)) {
        return format!("it belongs {}", section_of(name));
    }
    let known = keys_of(section);
    if let near @ [_, ..] = nearest(key, known).as_slice() {
        let near: Vec<String> = near.iter().map(|key| format!("`{key}`")).collect();
        return format!("did you mean {}?", near.join(" or "));
    }
    for (name, keys) in SECTIONS {
        if let [near, ..] = nearest(key, keys).as_slice() {
            return format!("did you mean `{near}`, {}?", section_of(name));
        }
    }
    format!("known here: {}", known.join(", "))
}

/// Returns the likely intended candidates: those at the smallest distance, if that is small for the word's length. A
/// word that is a prefix of another counts as one step away from it, so that `mem` finds `memory`.
pub(super) fn nearest<'c>(word: &str, candidates: &[&'c str]) -> Vec<&'c str> {
    let lower = word.to_ascii_lowercase();
    let distance = |candidate: &str| {
        let is_prefix =
            lower.len() >= 3 && candidate.starts_with(&lower) || candidate.len() >= 3 && lower.starts_with(candidate);
        if is_prefix { 1 } else { strsim::damerau_levenshtein(&lower, candidate) }
    };
    let Some(least) = candidates.iter().map(|c| distance(c)).min() else { return Vec::new() };
    if least > (word.chars().count() / 3).max(1) {
        return Vec::new();
    }
    candidates.iter().copied().filter(|c| distance(c) == least).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_the_nearest_key_or_its_section() {
        for (section, key, expected) in [
            ("", "memmory", "did you mean `memory`?"),
            ("", "mem", "did you mean `memory`?"),
            ("", "Memory", "did you mean `memory`?"),
            ("", "cpus", "did you mean `vcpus` or `cpu`?"),
            ("", "disks", "did you mean `disk`?"),
            ("", "kernel", "it belongs under [boot]"),
            ("boot", "memory", "it belongs at the top, above the first [section]"),
            ("", "bridge", "it belongs under [[net]]"),
            ("", "adress", "did you mean `address`, under [[net]]?"),
            ("ram", "zzz", "known here: dir, prealloc"),
        ] {
            assert_eq!(hint_for_unknown(section, key), expected, "[{section}] {key}");
        }
    }
}
