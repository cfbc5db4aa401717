//! A TOML text that is read key by key. Every mistake is recorded with its position, and reading continues after it.
//!
//! Serde's derive cannot do this. With `toml::Spanned` it keeps positions, but it stops at the first mistake, and
//! toml's errors are texts without the key, the value as written or the choices that a hint needs. We tried a
//! deserializer of our own below the derive that records mistakes and continues: with its structs it had over 200
//! lines more than this walk through the parsed tree.
//!
//! The getters of [`Section`] return `None` both for a missing key and for a wrong one: the mistake is recorded, and
//! the reader continues with the default. Therefore one run reports all mistakes.

use std::cell::RefCell;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{DefinitionError, DefinitionErrors, Problem};
use super::hints::{hint, keys_of, nearest};

/// A text and the mistakes found in it so far.
pub(super) struct Document<'d> {
    text: &'d str,
    file: &'d str,
    /// Absolute directory to which relative paths refer.
    base: PathBuf,
    problems: RefCell<Vec<(usize, Problem)>>,
}

/// A value and its byte offset in the text.
#[derive(Clone, Copy)]
pub(super) struct Found<T> {
    pub value: T,
    pub at: usize,
}

/// One table: the top level, `[boot]`, or one `[[disk]]`.
pub(super) struct Section<'d> {
    document: &'d Document<'d>,
    /// Name in [`SECTIONS`]; empty for the top level.
    name: &'static str,
    table: Option<&'d DeTable<'d>>,
    /// Byte offset at which the table starts.
    pub at: usize,
}

impl<'d> Document<'d> {
    pub fn new(text: &'d str, base: &Path, file: &'d str) -> Self {
        let base = std::path::absolute(base).unwrap_or_else(|_| base.to_owned());
        Self { text, file, base, problems: RefCell::default() }
    }

    /// Parses the text. After any syntax error the rest of the tree is unreliable: then all syntax errors are
    /// recorded.
    pub fn tree(&self) -> Option<Spanned<DeTable<'d>>> {
        let (tree, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            self.note(error.span().map_or(0, |span| span.start), Problem::Syntax(error.message().replace('\n', "; ")));
        }
        errors.is_empty().then_some(tree)
    }

    pub fn note(&self, at: usize, problem: Problem) {
        self.problems.borrow_mut().push((at, problem));
    }

    pub fn conflict(&self, at: usize, message: impl Into<String>) {
        self.note(at, Problem::Conflict(message.into()));
    }

    pub fn is_clean(&self) -> bool {
        self.problems.borrow().is_empty()
    }

    /// Returns the path relative to the definition's folder, without `.` parts. Links are not resolved, since their
    /// targets may be meant to change.
    pub fn resolve(&self, path: &str) -> PathBuf {
        let joined = self.base.join(path);
        std::path::absolute(&joined).unwrap_or(joined)
    }

    /// Returns line and column, both counted from 1, the column in characters.
    pub fn position(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }

    pub fn into_errors(self) -> DefinitionErrors {
        let mut problems = self.problems.take();
        problems.sort_by_key(|(at, _)| *at);
        let errors = problems.into_iter().map(|(at, problem)| {
            let (line, column) = self.position(at);
            DefinitionError { line, column, problem }
        });
        DefinitionErrors { file: self.file.to_owned(), errors: errors.collect() }
    }
}

impl<'d> Section<'d> {
    pub fn top(document: &'d Document<'d>, tree: &'d Spanned<DeTable<'d>>) -> Self {
        Self::new(document, "", Some(tree.get_ref()), 0)
    }

    /// Records unknown keys, so that the getters do not have to check for them.
    fn new(document: &'d Document<'d>, name: &'static str, table: Option<&'d DeTable<'d>>, at: usize) -> Self {
        let section = Self { document, name, table, at };
        for key in table.into_iter().flat_map(|table| table.keys()) {
            if !section.keys().contains(&key.get_ref().as_ref()) {
                let hint = hint(name, key.get_ref());
                section.document.note(key.span().start, Problem::UnknownKey { key: section.path(key.get_ref()), hint });
            }
        }
        section
    }

    fn keys(&self) -> &'static [&'static str] {
        keys_of(self.name)
    }

    /// Returns whether the table has no key at all.
    pub fn is_empty(&self) -> bool {
        self.table.is_none_or(|table| table.is_empty())
    }

    /// Returns whether `key` is absent, or an empty array.
    pub fn is_missing(&self, key: &'static str) -> bool {
        self.value(key).is_none_or(|value| value.get_ref().as_array().is_some_and(|array| array.is_empty()))
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns a key with its section, as in messages.
    pub fn path(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub fn document(&self) -> &'d Document<'d> {
        self.document
    }

    /// Records an invalid value; `why` ends with what to do.
    pub fn invalid(&self, key: &str, value: impl Display, at: usize, why: impl Display) {
        let (key, value, why) = (self.path(key), value.to_string(), why.to_string());
        self.document.note(at, Problem::Invalid { key, value, why });
    }

    /// Records that the string value of a key is invalid.
    pub fn reject(&self, key: &'static str, why: impl Display) {
        if let Some(value) = self.value(key) {
            self.invalid(key, quoted(value.get_ref().as_str().unwrap_or_default()), value.span().start, why);
        }
    }

    /// Records that a required key is missing.
    pub fn missing(&self, key: &str, hint: &str) {
        self.document.note(self.at, Problem::Missing { key: self.path(key), hint: hint.to_owned() });
    }

    fn wrong_type(&self, key: &str, found: &Spanned<DeValue<'_>>, wanted: &'static str, hint: String) {
        let found_kind = kind(found.get_ref());
        let problem = Problem::WrongType { key: self.path(key), found: found_kind.into(), wanted, hint };
        self.document.note(found.span().start, problem);
    }

    fn value(&self, key: &'static str) -> Option<&'d Spanned<DeValue<'d>>> {
        debug_assert!(self.keys().contains(&key), "`{key}` is not listed for [{}]", self.name);
        self.table?.get(key)
    }

    /// Returns the byte offset of a key's value, whether it is valid or not.
    pub fn at(&self, key: &'static str) -> Option<usize> {
        self.value(key).map(|value| value.span().start)
    }

    /// Reads a text without control characters.
    pub fn text(&self, key: &'static str) -> Option<Found<&'d str>> {
        let value = self.value(key)?;
        let Some(text) = value.get_ref().as_str() else {
            let hint = match scalar(value.get_ref()) {
                Some(scalar) => format!("{key} = \"{scalar}\""),
                None => format!("{key} = \"...\""),
            };
            self.wrong_type(key, value, "a string", hint);
            return None;
        };
        let at = value.span().start;
        if text.chars().any(char::is_control) {
            self.invalid(key, quoted(text), at, "has a line break or another control character; write it in one line");
            return None;
        }
        Some(Found { value: text, at })
    }

    /// Reads a text and parses it.
    pub fn parsed<T: FromStr<Err: Display>>(&self, key: &'static str) -> Option<Found<T>> {
        let text = self.text(key)?;
        match text.value.parse() {
            Ok(value) => Some(Found { value, at: text.at }),
            Err(why) => {
                self.invalid(key, quoted(text.value), text.at, why);
                None
            }
        }
    }

    /// Reads a text that `check` accepts.
    pub fn checked<E: Display>(
        &self,
        key: &'static str,
        check: impl Fn(&str) -> Result<(), E>,
    ) -> Option<Found<&'d str>> {
        let text = self.text(key)?;
        match check(text.value) {
            Ok(()) => Some(text),
            Err(why) => {
                self.invalid(key, quoted(text.value), text.at, why);
                None
            }
        }
    }

    /// Reads a quantity with its unit. The hint for a bare number explains the unit, not the missing quotes.
    pub fn quantity<T: FromStr<Err: Display>>(&self, key: &'static str) -> Option<Found<T>> {
        let value = self.value(key)?;
        if value.get_ref().is_str() {
            return self.parsed(key);
        }
        let written = scalar(value.get_ref()).unwrap_or_else(|| "[...]".into());
        let why = match written.parse::<T>() {
            Ok(_) => "not a string; write it in quotes".to_owned(),
            Err(why) => why.to_string(),
        };
        self.invalid(key, written, value.span().start, why);
        None
    }

    /// Reads one out of `choices`.
    pub fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Option<Found<T>> {
        let known: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let value = self.value(key)?;
        if !value.get_ref().is_str() {
            self.wrong_type(key, value, "a string", format!("one out of {}", quoted_list(&known)));
            return None;
        }
        let text = self.text(key)?;
        match choices.iter().find(|(name, _)| *name == text.value) {
            Some((_, choice)) => Some(Found { value: *choice, at: text.at }),
            None => {
                let why = match nearest(text.value, &known).as_slice() {
                    [] => format!("unknown; write one out of {}", quoted_list(&known)),
                    near => format!(
                        "unknown; did you mean {}?",
                        near.iter().map(|n| quoted(n)).collect::<Vec<_>>().join(" or ")
                    ),
                };
                self.invalid(key, quoted(text.value), text.at, why);
                None
            }
        }
    }

    /// Reads `true` or `false`; returns `default` if the key is absent or wrong.
    pub fn flag(&self, key: &'static str, default: bool) -> bool {
        let Some(value) = self.value(key) else { return default };
        if let Some(flag) = value.get_ref().as_bool() {
            return flag;
        }
        let hint = match value.get_ref().as_str().map(str::to_ascii_lowercase).as_deref() {
            Some("true" | "yes" | "on" | "1") => format!("{key} = true"),
            Some("false" | "no" | "off" | "0") => format!("{key} = false"),
            _ => format!("{key} = true or {key} = false"),
        };
        self.wrong_type(key, value, "a boolean", hint);
        default
    }

    /// Reads a whole number from `least` to `most`.
    pub fn number<T>(&self, key: &'static str, least: T, most: T) -> Option<Found<T>>
    where
        T: Copy + Display + PartialOrd + FromStr + TryFrom<i64>,
    {
        let value = self.value(key)?;
        let DeValue::Integer(number) = value.get_ref() else {
            let hint = match value.get_ref().as_str().filter(|text| text.parse::<T>().is_ok()) {
                Some(text) => format!("{key} = {text}, without quotes"),
                None => format!("{key} = {least}"),
            };
            self.wrong_type(key, value, "an integer", hint);
            return None;
        };
        let at = value.span().start;
        match i64::from_str_radix(number.as_str(), number.radix()).ok().and_then(|n| T::try_from(n).ok()) {
            Some(value) if (least..=most).contains(&value) => Some(Found { value, at }),
            _ => {
                let why = format!("out of range; write a number from {least} to {most}");
                self.invalid(key, scalar(&DeValue::Integer(number.clone())).unwrap_or_default(), at, why);
                None
            }
        }
    }

    /// Reads an array of strings.
    pub fn texts(&self, key: &'static str) -> Vec<Found<&'d str>> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            let hint = match value.get_ref().as_str() {
                Some(text) => format!("{key} = [{}]", quoted(text)),
                None => format!("{key} = [\"...\"]"),
            };
            self.wrong_type(key, value, "an array of strings", hint);
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, item) in array.iter().enumerate() {
            match item.get_ref().as_str() {
                Some(text) => texts.push(Found { value: text, at: item.span().start }),
                None => {
                    let hint = format!("\"{}\"", scalar(item.get_ref()).unwrap_or_else(|| "...".into()));
                    self.wrong_type(&format!("{key}[{index}]"), item, "a string", hint);
                }
            }
        }
        texts
    }

    /// Returns the table `[name]`; an empty one if it is absent.
    pub fn section(&self, name: &'static str) -> Section<'d> {
        let Some(value) = self.value(name) else { return Section::new(self.document, name, None, self.at) };
        if value.get_ref().as_table().is_none() {
            let tables = value.get_ref().as_array().is_some_and(|array| array.iter().all(|v| v.get_ref().is_table()));
            let hint = if tables {
                format!("[{name}] with single brackets")
            } else {
                format!("[{name}] and its keys below it")
            };
            self.wrong_type(name, value, "a table", hint);
        }
        Section::new(self.document, name, value.get_ref().as_table(), value.span().start)
    }

    /// Returns the tables `[[name]]`.
    pub fn sections(&self, name: &'static str) -> Vec<Section<'d>> {
        let Some(value) = self.value(name) else { return Vec::new() };
        let hint = match value.get_ref() {
            DeValue::Table(_) => format!("[[{name}]] with double brackets"),
            _ => format!("[[{name}]] and its keys below it, once for each"),
        };
        let items = value.get_ref().as_array().map(|array| array.iter().collect::<Vec<_>>());
        if items.as_ref().is_none_or(|items| !items.iter().all(|item| item.get_ref().is_table())) {
            self.wrong_type(name, value, "an array of tables", hint);
            return Vec::new();
        }
        let items = items.unwrap_or_default().into_iter();
        items.map(|item| Section::new(self.document, name, item.get_ref().as_table(), item.span().start)).collect()
    }
}

/// Returns a text in quotes, always in one line.
pub(super) fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn quoted_list(texts: &[&str]) -> String {
    texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", ")
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}

/// Returns a number, date or boolean as the file has it.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Integer(number) => match number.radix() {
            16 => Some(format!("0x{}", number.as_str())),
            8 => Some(format!("0o{}", number.as_str())),
            2 => Some(format!("0b{}", number.as_str())),
            _ => Some(number.as_str().to_owned()),
        },
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(flag) => Some(flag.to_string()),
        DeValue::Datetime(date) => Some(date.to_string()),
        DeValue::String(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters() {
        let document = Document::new("a = 1\nné = 2\n", Path::new("/"), "x");
        assert_eq!(document.position(0), (1, 1));
        assert_eq!(document.position("a = 1\nné".len()), (2, 3));
        assert_eq!(document.position(1000), (3, 1));
    }
}
