//! What can be wrong with a definition: one [`DefinitionError`] per mistake, all of a file's in [`DefinitionErrors`].

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Every mistake that was found in one definition, in the order of the file. Never empty.
///
/// `Display` writes a line for each, as compilers do: `web.toml:3:1: unknown key `memmory`; did you mean `memory`?`
#[derive(Debug)]
pub struct DefinitionErrors {
    pub(super) file: String,
    pub(super) errors: Vec<DefinitionError>,
}

/// One mistake and where it stands.
#[derive(Debug)]
pub struct DefinitionError {
    /// Line, from 1; 0 if the file could not be read at all.
    pub line: usize,
    /// Column in characters, from 1; 0 if the file could not be read at all.
    pub column: usize,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong. Keys are written with their section: `memory`, `boot.kernel`, `disk.path`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file is not there, or is no text.
    #[error("cannot read the definition")]
    Unreadable(#[source] io::Error),
    /// XML.
    #[error("{0}")]
    Xml(String),
    /// Not TOML.
    #[error("not valid TOML: {0}")]
    Syntax(String),
    /// A key that this section does not have.
    #[error("unknown key `{key}`; {hint}")]
    UnknownKey {
        /// With its section.
        key: String,
        /// The nearest known one, or the section that has it, or all that there are.
        hint: String,
    },
    /// A key that must be there is not.
    #[error("`{key}` is missing; {hint}")]
    Missing {
        /// With its section.
        key: String,
        /// What to write.
        hint: String,
    },
    /// A number where a text belongs, and so on.
    #[error("`{key}` is {found}, but must be {wanted}; write {hint}")]
    WrongType {
        /// With its section.
        key: String,
        /// The kind of value that stands there.
        found: String,
        /// The kind that belongs there.
        wanted: &'static str,
        /// The line that is right.
        hint: String,
    },
    /// A value that cannot be.
    #[error("`{key} = {value}`: {why}")]
    Invalid {
        /// With its section.
        key: String,
        /// As TOML writes it.
        value: String,
        /// The reason and, behind a semicolon, what to do.
        why: String,
    },
    /// A file that cannot be used.
    #[error("`{key} = {value}`: cannot open {path}")]
    File {
        /// With its section.
        key: String,
        /// As TOML writes it.
        value: String,
        /// The value as an absolute path.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        source: io::Error,
    },
    /// The same thing twice.
    #[error("`{key} = {value}` is already taken in line {line}; {hint}")]
    Duplicate {
        /// With its section.
        key: String,
        /// As TOML writes it.
        value: String,
        /// Where it stands first.
        line: usize,
        /// What to do.
        hint: &'static str,
    },
    /// Keys that do not go together.
    #[error("{0}")]
    Conflict(String),
}

impl DefinitionErrors {
    /// The file's name as given, or what stood for it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The mistakes, in the order of the file.
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

/// `LINE:COLUMN: problem: cause`. The cause stands here, and is not a `source`, since a list has many.
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
