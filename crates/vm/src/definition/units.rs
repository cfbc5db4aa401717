//! Quantities with their unit: [`Bytes`] (`512M`) and [`Span`] (`250ms`).
//!
//! A quantity is one whole number and one unit, with nothing between. This is narrower than most parsers, on purpose:
//! `1.5G`, `512MB` or a bare `512` mean different things in different programs. Such a text is rejected with a hint
//! that has the most likely intended spelling. `Display` writes the largest unit that is exact, and its text can be
//! read back. Crates that parse sizes or durations accept these texts, some with another meaning (`512M` as 512
//! million), and do not report which part is wrong.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A unit, its size in the smallest unit, and other programs' names of it in lower case.
struct Unit {
    name: &'static str,
    scale: u64,
    foreign: &'static [&'static str],
}

/// The difference between sizes and durations.
struct UnitSystem {
    /// "size" or "duration".
    quantity: &'static str,
    examples: &'static str,
    /// The largest first.
    units: &'static [Unit],
    /// The most likely unit of a number without one.
    usual: &'static str,
}

const SIZES: UnitSystem = UnitSystem {
    quantity: "size",
    examples: "\"512M\" or \"2G\"",
    units: &[
        Unit { name: "T", scale: 1 << 40, foreign: &["t", "tb", "tib"] },
        Unit { name: "G", scale: 1 << 30, foreign: &["g", "gb", "gib"] },
        Unit { name: "M", scale: 1 << 20, foreign: &["m", "mb", "mib"] },
        Unit { name: "K", scale: 1 << 10, foreign: &["k", "kb", "kib"] },
        Unit { name: "B", scale: 1, foreign: &["b", "byte", "bytes"] },
    ],
    usual: "M",
};

const SPANS: UnitSystem = UnitSystem {
    quantity: "duration",
    examples: "\"250ms\", \"2s\" or \"1m\"",
    units: &[
        Unit { name: "h", scale: 3_600_000, foreign: &["h", "hr", "hour", "hours"] },
        Unit { name: "m", scale: 60_000, foreign: &["m", "min", "mins", "minute", "minutes"] },
        Unit { name: "s", scale: 1000, foreign: &["s", "sec", "secs", "second", "seconds"] },
        Unit { name: "ms", scale: 1, foreign: &["ms", "msec", "millis"] },
    ],
    usual: "s",
};

/// Why a text is not a quantity. The message ends with what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// A number without a unit.
    #[error("{number} has no unit; write {hint}")]
    NoUnit {
        /// The number as written.
        number: String,
        /// One or more valid spellings.
        hint: String,
    },
    /// A unit that Rekindle does not use, or spells with other capitals.
    #[error("unknown unit `{unit}`; write {hint}")]
    UnknownUnit {
        /// The unit as written.
        unit: String,
        /// One or more valid spellings.
        hint: String,
    },
    /// A fraction; only whole numbers are exact.
    #[error("not a whole number; write {hint}")]
    Fraction {
        /// One or more valid spellings.
        hint: String,
    },
    /// The number is missing, or something follows the unit.
    #[error("not a {what}; write a whole number and a unit, for example {hint}")]
    Malformed {
        /// "size" or "duration".
        what: &'static str,
        /// One or more valid spellings.
        hint: &'static str,
    },
    /// More bytes or milliseconds than fit into 64 bits.
    #[error("too large")]
    TooLarge,
}

/// A number of bytes. `Display` and serde use the largest exact binary unit: `512M`, and `4M` for `4096K`.
///
/// ```
/// use rekindle_vm::definition::Bytes;
/// let memory: Bytes = "2048M".parse().unwrap();
/// assert_eq!((memory.as_u64(), memory.to_string().as_str()), (2 << 30, "2G"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Bytes(u64);

impl Bytes {
    /// Makes a size from bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Makes a size from MiB.
    pub const fn from_mib(mib: u32) -> Self {
        Self((mib as u64) << 20)
    }

    /// Returns the number of bytes.
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

/// A length of time in whole milliseconds. `Display` and serde use the largest exact unit: `250ms`, and `1m` for
/// `60s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Span(u64);

impl Span {
    /// Makes a span from milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Makes a span from seconds.
    pub const fn from_secs(secs: u32) -> Self {
        Self(secs as u64 * 1000)
    }

    /// Returns the number of milliseconds.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Returns the span as the standard library's type.
    pub const fn as_duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        span.as_duration()
    }
}

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        SIZES.parse(text).map(Self)
    }
}

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        SPANS.parse(text).map(Self)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&SIZES.format(self.0))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&SPANS.format(self.0))
    }
}

serde_as_text!(Bytes, Span);

impl UnitSystem {
    /// Parses a quantity and returns it in the smallest unit.
    fn parse(&self, text: &str) -> Result<u64, UnitError> {
        let (number, unit_text) = split_digits(text);
        if let Some(fraction) = unit_text.strip_prefix('.').filter(|_| !number.is_empty()) {
            let (fraction, unit) = split_digits(fraction);
            let hint = self.as_whole_number(number, fraction, unit).unwrap_or_else(|| self.examples.into());
            return Err(UnitError::Fraction { hint });
        }
        if number.is_empty() || unit_text.contains(|c: char| !c.is_ascii_alphabetic() && c != ' ') {
            return Err(UnitError::Malformed { what: self.quantity, hint: self.examples });
        }
        if unit_text.is_empty() {
            return Err(UnitError::NoUnit { number: number.into(), hint: self.add_usual_unit(number) });
        }
        let Some(unit) = self.units.iter().find(|unit| unit.name == unit_text) else {
            let hint = match self.unit_named_otherwise(unit_text) {
                Some(unit) => format!("\"{number}{}\"", unit.name),
                None => format!(
                    "a unit out of {}",
                    self.units.iter().rev().map(|unit| unit.name).collect::<Vec<_>>().join(", ")
                ),
            };
            return Err(UnitError::UnknownUnit { unit: unit_text.trim().into(), hint });
        };
        number.parse::<u64>().ok().and_then(|n| n.checked_mul(unit.scale)).ok_or(UnitError::TooLarge)
    }

    /// Returns the unit that other programs, or other capitals, call by this name.
    fn unit_named_otherwise(&self, unit: &str) -> Option<&Unit> {
        let unit = unit.trim().to_ascii_lowercase();
        self.units.iter().find(|known| known.foreign.contains(&unit.as_str()))
    }

    /// Returns what to write for a number without a unit: the number with the usual unit. A large size is taken for
    /// bytes and written in the largest exact unit.
    fn add_usual_unit(&self, number: &str) -> String {
        let is_bytes = self.units.iter().any(|unit| unit.name == "B");
        match number.parse::<u64>() {
            Ok(n) if n >= 1 << 20 && is_bytes => format!("\"{}\"", self.format(n)),
            _ => format!("\"{number}{}\"", self.usual),
        }
    }

    /// Returns `1.5` `G` as a whole number of a smaller unit, if that is exact.
    fn as_whole_number(&self, whole: &str, fraction: &str, unit: &str) -> Option<String> {
        let denominator = 10u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let digits: u64 = format!("{whole}{fraction}").parse().ok()?;
        let scaled = digits.checked_mul(self.unit_named_otherwise(unit)?.scale)?;
        scaled.is_multiple_of(denominator).then(|| format!("\"{}\"", self.format(scaled / denominator)))
    }

    /// Writes a value in the largest exact unit.
    fn format(&self, value: u64) -> String {
        let exact = self.units.iter().find(|unit| value != 0 && value.is_multiple_of(unit.scale));
        exact.or(self.units.last()).map_or_else(String::new, |unit| format!("{}{}", value / unit.scale, unit.name))
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_read_and_written_in_the_largest_exact_unit() {
        for (text, bytes, shown) in [
            ("512M", 512 << 20, "512M"),
            ("2G", 2 << 30, "2G"),
            ("4096K", 4 << 20, "4M"),
            ("1T", 1 << 40, "1T"),
            ("1000B", 1000, "1000B"),
            ("0M", 0, "0B"),
        ] {
            let size: Bytes = text.parse().unwrap();
            assert_eq!((size.as_u64(), size.to_string().as_str()), (bytes, shown), "{text}");
        }
        assert_eq!(format!("{:>6}|", Bytes::from_mib(2)), "    2M|");
    }

    #[test]
    fn spans_are_read_and_written_in_the_largest_exact_unit() {
        for (text, millis, shown) in [
            ("250ms", 250, "250ms"),
            ("2s", 2000, "2s"),
            ("1m", 60_000, "1m"),
            ("90s", 90_000, "90s"),
            ("2h", 7_200_000, "2h"),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!((span.as_millis(), span.to_string().as_str()), (millis, shown), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_answered_with_the_right_one() {
        for (text, message) in [
            ("512", "512 has no unit; write \"512M\""),
            ("536870912", "536870912 has no unit; write \"512M\""),
            ("512MB", "unknown unit `MB`; write \"512M\""),
            ("512 MiB", "unknown unit `MiB`; write \"512M\""),
            ("512m", "unknown unit `m`; write \"512M\""),
            ("512 M", "unknown unit `M`; write \"512M\""),
            ("512s", "unknown unit `s`; write a unit out of B, K, M, G, T"),
            ("1.5G", "not a whole number; write \"1536M\""),
            ("0.3K", "not a whole number; write \"512M\" or \"2G\""),
            ("-1M", "not a size; write a whole number and a unit, for example \"512M\" or \"2G\""),
            ("", "not a size; write a whole number and a unit, for example \"512M\" or \"2G\""),
            ("99999999T", "too large"),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap_err().to_string(), message, "{text}");
        }
    }

    #[test]
    fn a_wrong_span_is_answered_with_the_right_one() {
        for (text, message) in [
            ("60", "60 has no unit; write \"60s\""),
            ("5000000", "5000000 has no unit; write \"5000000s\""),
            ("2 sec", "unknown unit `sec`; write \"2s\""),
            ("2S", "unknown unit `S`; write \"2s\""),
            ("2M", "unknown unit `M`; write \"2m\""),
            ("3us", "unknown unit `us`; write a unit out of ms, s, m, h"),
            ("1.5s", "not a whole number; write \"1500ms\""),
            ("1m30s", "not a duration; write a whole number and a unit, for example \"250ms\", \"2s\" or \"1m\""),
        ] {
            assert_eq!(text.parse::<Span>().unwrap_err().to_string(), message, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_can_be_read(n: u64) {
            prop_assert_eq!(Bytes(n).to_string().parse::<Bytes>().unwrap(), Bytes(n));
            prop_assert_eq!(Span(n).to_string().parse::<Span>().unwrap(), Span(n));
        }

        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = text.parse::<Bytes>();
            let _ = text.parse::<Span>();
        }
    }
}
