//! The CPU features that a guest sees.
//!
//! The device state does not hold them: a guest that continues in another QEMU could get features that it has never
//! seen or, worse, lose features that it uses.

use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Feature words, by the name of the CPUID leaf and register, e.g. `CPUID 0x1 EDX`.
pub type Features = BTreeMap<String, u64>;

/// Bits that only mean that there is more than one core. QEMU 7.2 sets them in what the guest reads, and QEMU 10.0
/// already in its feature words. The guest sees the same.
const TOPOLOGY_BITS: &[(&str, u64)] = &[("CPUID 0x1 EDX", 1 << 28), ("CPUID 0x80000001 ECX", 1 << 1)];

/// Returns the guest's feature words. Empty if the CPUs are not x86.
///
/// # Errors
/// When QEMU does not answer or returns an error.
pub fn features(qmp: &mut Qmp) -> Result<Features, QmpError> {
    let cpus: Vec<Value> = qmp.execute("query-cpus-fast", ())?;
    let Some(path) = cpus.first().and_then(|cpu| cpu.get("qom-path")).and_then(Value::as_str) else {
        return Ok(BTreeMap::new());
    };
    let words: Vec<Value> = qmp.execute("qom-get", json!({"path": path, "property": "feature-words"}))?;
    Ok(words.iter().filter_map(named_word).collect())
}

/// Returns the name and the value of a feature word that QEMU reports.
fn named_word(word: &Value) -> Option<(String, u64)> {
    let number = |key: &str| word.get(key).and_then(Value::as_u64);
    let leaf = number("cpuid-input-eax")?;
    let subleaf = number("cpuid-input-ecx").map(|subleaf| format!(".{subleaf}")).unwrap_or_default();
    let register = word.get("cpuid-register")?.as_str()?;
    let name = format!("CPUID {leaf:#x}{subleaf} {register}");
    let topology_bits = TOPOLOGY_BITS.iter().find(|(word, _)| *word == name).map_or(0, |(_, bits)| *bits);
    Some((name, number("features")? & !topology_bits))
}

/// Returns the words of `before` that differ in `now`: name, before, now. A missing word counts as zero. Words that
/// only `now` has are ignored: they come from a newer QEMU, and an older one never showed them to the guest.
pub fn differences(before: &Features, now: &Features) -> Vec<(String, u64, u64)> {
    let mut differences = Vec::new();
    for (name, &value_before) in before {
        let value_now = now.get(name).copied().unwrap_or(0);
        if value_now != value_before {
            differences.push((name.clone(), value_before, value_now));
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(words: &[(&str, u64)]) -> Features {
        words.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn only_differences_are_reported() {
        let before = features(&[("a", 1), ("b", 2), ("c", 0), ("d", 4)]);
        let now = features(&[("a", 1), ("b", 3), ("e", 0)]);
        assert_eq!(differences(&before, &now), [("b".into(), 2, 3), ("d".into(), 4, 0)]);
        assert!(differences(&before, &before).is_empty());
    }
}
