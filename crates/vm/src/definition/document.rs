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
use super::keys::{hint_for_unknown, keys_of, nearest};

/// A text and the mistakes found in it so far.
pub(super) struct Document<'d> {
    text: &'d str,
    file: &'d str,
    /// Absolute directory to which relative paths refer.
    base: PathBuf,
    problems: RefCell<Vec<LocatedProblem>>,
}

/// A mistake at a byte offset in the text.
struct LocatedProblem {
    offset: usize,
    problem: Problem,
}

/// An item of an array of texts, with its byte offset.
#[derive(Clone, Copy)]
pub(super) struct TextItem<'d> {
    pub text: &'d str,
    pub offset: usize,
}

/// One table: the top level, `[boot]`, or one `[[disk]]`.
pub(super) struct Section<'d> {
    document: &'d Document<'d>,
    /// Name in [`super::keys::SECTIONS`]; empty for the top level.
    name: &'static str,
    table: Option<&'d DeTable<'d>>,
    /// Byte offset at which the table starts.
    start: usize,
}

impl<'d> Document<'d> {
    pub fn new(text: &'d str, base: &Path, file: &'d str) -> Self {
        let base = std::path::absolute(base).unwrap_or_else(|_| base.to_owned());
        Self { text, file, base, problems: RefCell::default() }
    }

    /// Parses the text. After any syntax error the rest of the tree is unreliable: then all syntax errors are
    /// recorded.
    pub fn parse_tree(&self) -> Option<Spanned<DeTable<'d>>> {
        let (tree, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let offset = error.span().map_or(0, |span| span.start);
            self.record(offset, Problem::Syntax(error.message().replace('\n', "; ")));
        }
        errors.is_empty().then_some(tree)
    }

    /// Records a mistake at a byte offset.
    pub fn record(&self, offset: usize, problem: Problem) {
        self.problems.borrow_mut().push(LocatedProblem { offset, problem });
    }

    pub fn has_no_problem(&self) -> bool {
        self.problems.borrow().is_empty()
    }

    /// Returns the path relative to the definition's folder, without `.` parts. Links are not resolved, since their
    /// targets may be meant to change.
    pub fn resolve(&self, path: &str) -> PathBuf {
        let joined = self.base.join(path);
        std::path::absolute(&joined).unwrap_or(joined)
    }

    /// Returns line and column, both counted from 1, the column in characters.
    fn position(&self, offset: usize) -> (usize, usize) {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }

    /// Returns the line of a byte offset, counted from 1.
    pub fn line(&self, offset: usize) -> usize {
        self.position(offset).0
    }

    pub fn into_errors(self) -> DefinitionErrors {
        let mut problems = self.problems.take();
        problems.sort_by_key(|located| located.offset);
        let errors = problems.into_iter().map(|LocatedProblem { offset, problem }| {
            let (line, column) = self.position(offset);
            DefinitionError { line, column, problem }
        });
        DefinitionErrors { file: self.file.to_owned(), errors: errors.collect() }
    }
}

/// What a section is, and the mistakes that are recorded in it.
impl<'d> Section<'d> {
    /// Returns the top level of a definition.
    pub fn top(document: &'d Document<'d>, tree: &'d Spanned<DeTable<'d>>) -> Self {
        Self::new(document, "", Some(tree.get_ref()), 0)
    }

    /// Records unknown keys, so that the getters do not have to check for them.
    fn new(document: &'d Document<'d>, name: &'static str, table: Option<&'d DeTable<'d>>, start: usize) -> Self {
        let section = Self { document, name, table, start };
        for key in table.into_iter().flat_map(|table| table.keys()) {
            if !keys_of(name).contains(&key.get_ref().as_ref()) {
                let hint = hint_for_unknown(name, key.get_ref());
                document.record(key.span().start, Problem::UnknownKey { key: section.path(key.get_ref()), hint });
            }
        }
        section
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn document(&self) -> &'d Document<'d> {
        self.document
    }

    /// Returns a key with its section, as in messages.
    pub fn path(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    /// Returns whether the table has no key at all.
    pub fn is_empty(&self) -> bool {
        self.table.is_none_or(|table| table.is_empty())
    }

    /// Returns whether the section has the key, with a valid or a wrong value.
    pub fn has(&self, key: &'static str) -> bool {
        self.value(key).is_some()
    }

    /// Returns whether `key` is absent, or an empty array.
    pub fn is_missing(&self, key: &'static str) -> bool {
        self.value(key).is_none_or(|value| value.get_ref().as_array().is_some_and(|array| array.is_empty()))
    }

    /// Returns the byte offset of a key's value; of the section if it does not have the key.
    pub fn offset(&self, key: &'static str) -> usize {
        self.value(key).map_or(self.start, |value| value.span().start)
    }

    /// Records that the value of a key is invalid; `why` ends with what to do.
    pub fn reject(&self, key: &'static str, why: impl Display) {
        if let Some(value) = self.value(key) {
            self.record_invalid(key, as_written(value.get_ref()), value.span().start, why);
        }
    }

    /// Records that an item of an array is invalid; `why` ends with what to do.
    pub fn reject_item(&self, key: &str, item: &TextItem<'_>, why: impl Display) {
        self.record_invalid(key, quoted(item.text), item.offset, why);
    }

    fn record_invalid(&self, key: &str, value: String, offset: usize, why: impl Display) {
        self.document.record(offset, Problem::Invalid { key: self.path(key), value, why: why.to_string() });
    }

    /// Records at a key (at the section if it does not have the key) that keys exclude or require each other.
    pub fn conflict(&self, key: &'static str, message: impl Into<String>) {
        self.document.record(self.offset(key), Problem::Conflict(message.into()));
    }

    /// Records at the beginning of the section that something in it is not possible.
    pub fn conflict_of_section(&self, message: impl Into<String>) {
        self.document.record(self.start, Problem::Conflict(message.into()));
    }

    /// Records that a required key is missing.
    pub fn record_missing(&self, key: &str, hint: &str) {
        self.document.record(self.start, Problem::Missing { key: self.path(key), hint: hint.to_owned() });
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &'static str, hint: String) {
        let found = type_of(value.get_ref()).into();
        self.document.record(value.span().start, Problem::WrongType { key: self.path(key), found, wanted, hint });
    }

    fn value(&self, key: &'static str) -> Option<&'d Spanned<DeValue<'d>>> {
        debug_assert!(keys_of(self.name).contains(&key), "`{key}` is not listed for [{}]", self.name);
        self.table?.get(key)
    }
}

/// The getters.
impl<'d> Section<'d> {
    /// Reads a text without control characters.
    pub fn text(&self, key: &'static str) -> Option<&'d str> {
        let value = self.value(key)?;
        let Some(text) = value.get_ref().as_str() else {
            let example = scalar(value.get_ref()).unwrap_or_else(|| "...".into());
            self.wrong_type(key, value, "a string", format!("{key} = \"{example}\""));
            return None;
        };
        if text.chars().any(char::is_control) {
            self.reject(key, "has a line break or another control character; write it in one line");
            return None;
        }
        Some(text)
    }

    /// Reads a text and parses it.
    pub fn parsed<T: FromStr<Err: Display>>(&self, key: &'static str) -> Option<T> {
        self.text(key)?.parse().map_err(|why| self.reject(key, why)).ok()
    }

    /// Reads a text that `check` accepts.
    pub fn checked<E: Display>(&self, key: &'static str, check: impl Fn(&str) -> Result<(), E>) -> Option<&'d str> {
        let text = self.text(key)?;
        check(text).map_err(|why| self.reject(key, why)).ok().map(|()| text)
    }

    /// Reads a quantity with its unit. The hint for a bare number explains the unit, not the missing quotes.
    pub fn quantity<T: FromStr<Err: Display>>(&self, key: &'static str) -> Option<T> {
        let value = self.value(key)?.get_ref();
        if value.is_str() {
            return self.parsed(key);
        }
        match as_written(value).parse::<T>() {
            Ok(_) => self.reject(key, "not a string; write it in quotes"),
            Err(why) => self.reject(key, why),
        }
        None
    }

    /// Reads one out of `choices`.
    pub fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let value = self.value(key)?;
        if !value.get_ref().is_str() {
            self.wrong_type(key, value, "a string", format!("one out of {}", quoted_list(&names, ", ")));
            return None;
        }
        let text = self.text(key)?;
        if let Some((_, choice)) = choices.iter().find(|(name, _)| *name == text) {
            return Some(*choice);
        }
        match nearest(text, &names).as_slice() {
            [] => self.reject(key, format!("unknown; write one out of {}", quoted_list(&names, ", "))),
            near => self.reject(key, format!("unknown; did you mean {}?", quoted_list(near, " or "))),
        }
        None
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

    /// Reads a whole number from `min` to `max`.
    pub fn number<T>(&self, key: &'static str, min: T, max: T) -> Option<T>
    where
        T: Copy + Display + PartialOrd + FromStr + TryFrom<i64>,
    {
        let value = self.value(key)?;
        let DeValue::Integer(integer) = value.get_ref() else {
            let hint = match value.get_ref().as_str().filter(|text| text.parse::<T>().is_ok()) {
                Some(text) => format!("{key} = {text}, without quotes"),
                None => format!("{key} = {min}"),
            };
            self.wrong_type(key, value, "an integer", hint);
            return None;
        };
        let number = i64::from_str_radix(integer.as_str(), integer.radix()).ok().and_then(|n| T::try_from(n).ok());
        let number = number.filter(|number| (min..=max).contains(number));
        if number.is_none() {
            self.reject(key, format!("out of range; write a number from {min} to {max}"));
        }
        number
    }

    /// Reads an array of strings.
    pub fn texts(&self, key: &'static str) -> Vec<TextItem<'d>> {
        let Some(value) = self.value(key) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            let example = value.get_ref().as_str().map_or_else(|| "\"...\"".into(), quoted);
            self.wrong_type(key, value, "an array of strings", format!("{key} = [{example}]"));
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, item) in array.iter().enumerate() {
            match item.get_ref().as_str() {
                Some(text) => texts.push(TextItem { text, offset: item.span().start }),
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
        let Some(value) = self.value(name) else { return Section::new(self.document, name, None, self.start) };
        if !value.get_ref().is_table() {
            let is_array_of_tables =
                value.get_ref().as_array().is_some_and(|array| array.iter().all(|item| item.get_ref().is_table()));
            let hint = if is_array_of_tables { "with single brackets" } else { "and its keys below it" };
            self.wrong_type(name, value, "a table", format!("[{name}] {hint}"));
        }
        Section::new(self.document, name, value.get_ref().as_table(), value.span().start)
    }

    /// Returns the tables `[[name]]`.
    pub fn sections(&self, name: &'static str) -> Vec<Section<'d>> {
        let Some(value) = self.value(name) else { return Vec::new() };
        match value.get_ref().as_array() {
            Some(items) if items.iter().all(|item| item.get_ref().is_table()) => {
                let section = |item: &'d Spanned<DeValue<'d>>| {
                    Section::new(self.document, name, item.get_ref().as_table(), item.span().start)
                };
                items.iter().map(section).collect()
            }
            _ => {
                let is_table = value.get_ref().is_table();
                let hint = if is_table { "with double brackets" } else { "and its keys below it, once for each" };
                self.wrong_type(name, value, "an array of tables", format!("[[{name}]] {hint}"));
                Vec::new()
            }
        }
    }
}

/// Returns a text in quotes, always in one line.
pub(super) fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn quoted_list(texts: &[&str], separator: &str) -> String {
    texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(separator)
}

/// Returns a value as messages show it.
fn as_written(value: &DeValue<'_>) -> String {
    value.as_str().map(quoted).or_else(|| scalar(value)).unwrap_or_else(|| "[...]".into())
}

/// Returns the TOML type of a value, with its article.
fn type_of(value: &DeValue<'_>) -> &'static str {
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
