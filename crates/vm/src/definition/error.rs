//! The mistakes in a definition: one [`DefinitionError`] for each, and all of a file in [`DefinitionErrors`].

use std::fmt;
use std::io;
use std::path::PathBuf;

/// All mistakes that were found in one definition, in the order of the file. Never empty.
///
/// `Display` writes one line for each, as compilers do: `web.toml:3:1: unknown key `memmory`; did you mean `memory`?`
#[derive(Debug)]
pub struct DefinitionErrors {
    pub(super) file: String,
    pub(super) errors: Vec<DefinitionError>,
}

/// One mistake and its position.
#[derive(Debug)]
pub struct DefinitionError {
    /// Line, from 1; 0 if the file could not be read at all.
    pub line: usize,
    /// Column in characters, from 1; 0 if the file could not be read at all.
    pub column: usize,
    /// The kind of mistake.
    pub problem: Problem,
}

/// A kind of mistake. Keys are written with their section: `memory`, `boot.kernel`, `disk.path`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file is missing or not readable as text.
    #[error("cannot read the definition; write the path of the VM's TOML file")]
    Unreadable(#[source] io::Error),
    /// The file is XML.
    #[error("{0}")]
    Xml(String),
    /// The file is not TOML.
    #[error("not valid TOML: {0}")]
    Syntax(String),
    /// A key that this section does not have.
    #[error("unknown key `{key}`; {hint}")]
    UnknownKey {
        /// The key with its section.
        key: String,
        /// The nearest known key, the section that has the key, or all keys of the section.
        hint: String,
    },
    /// A required key is missing.
    #[error("`{key}` is missing; {hint}")]
    Missing {
        /// The key with its section.
        key: String,
        /// An example of the key.
        hint: String,
    },
    /// A value of the wrong TOML type, such as a number in place of a text.
    #[error("`{key}` is {found}, but must be {wanted}; write {hint}")]
    WrongType {
        /// The key with its section.
        key: String,
        /// The type of the value.
        found: String,
        /// The required type.
        wanted: &'static str,
        /// An example of the right value.
        hint: String,
    },
    /// A value that is not possible.
    #[error("`{key} = {value}`: {why}")]
    Invalid {
        /// The key with its section.
        key: String,
        /// The value as TOML writes it.
        value: String,
        /// The reason and, after a semicolon, what to do.
        why: String,
    },
    /// A file that cannot be used.
    #[error("`{key} = {value}`: cannot open {path}")]
    File {
        /// The key with its section.
        key: String,
        /// The value as TOML writes it.
        value: String,
        /// The value as an absolute path.
        path: PathBuf,
        /// The error of `open(2)` or `stat(2)`.
        #[source]
        source: io::Error,
    },
    /// A value that must be unique occurs twice.
    #[error("`{key} = {value}` is already taken in line {line}; {hint}")]
    Duplicate {
        /// The key with its section.
        key: String,
        /// The value as TOML writes it.
        value: String,
        /// Line of the first occurrence.
        line: usize,
        /// What to do.
        hint: &'static str,
    },
    /// Keys that exclude or require each other.
    #[error("{0}")]
    Conflict(String),
}

impl DefinitionErrors {
    /// Returns the file's name as the caller gave it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the mistakes, in the order of the file.
    pub fn iter(&self) -> std::slice::Iter<'_, DefinitionError> {
        self.errors.iter()
    }
}

impl fmt::Display for DefinitionErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.errors.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{}:{error}", self.file)?;
        }
        Ok(())
    }
}

impl std::error::Error for DefinitionErrors {}

/// Writes `LINE:COLUMN: problem: cause`. The cause is part of the text, not a `source`, because a list of mistakes
/// has many.
impl fmt::Display for DefinitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}:", self.line, self.column)?;
        }
        write!(f, " {}", self.problem)?;
        let mut cause = std::error::Error::source(&self.problem);
        while let Some(inner) = cause {
            write!(f, ": {inner}")?;
            cause = inner.source();
        }
        Ok(())
    }
}
