//! `--environment-file`: variables for an object store, from a file that only its owner can read.
//!
//! The file is read when a client of an object store is made, so that commands that need no store work without it. The
//! variables stay in this process: they are not in its environment, which other programs inherit.

use rustix::process::geteuid;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Prefix of the variables that a file may set.
const PREFIX: &str = "AWS_";
const MAX_BYTES: u64 = 64 << 10;
/// Permissions of users other than the owner.
const OTHERS: u32 = 0o077;

/// Why the variables of a file cannot be used. The messages contain no value of a variable.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentFileError {
    #[error(
        "there is no environment file {}; copy it from a host that has it, or correct --environment-file",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error("the environment file {} cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the environment file {} is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "the environment file {} belongs to user {owner}, which could replace it; correct that: chown root {}",
        path.display(), path.display()
    )]
    OfOtherUser { path: PathBuf, owner: u32 },
    #[error(
        "other users can access the environment file {} (mode {:03o}), and it has credentials; correct that: chmod 600 {}",
        path.display(), mode & 0o777, path.display()
    )]
    AccessibleByOthers { path: PathBuf, mode: u32 },
    #[error("the environment file {} is longer than the {MAX_BYTES} bytes that variables can have", path.display())]
    TooLong { path: PathBuf },
    #[error("the environment file {}, line {line}: {what}", path.display())]
    Line { path: PathBuf, line: usize, what: String },
}

/// Variables by name.
#[derive(Clone, PartialEq, Eq, Default)]
pub(crate) struct Variables(pub(crate) BTreeMap<String, String>);

impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The values are secret.
        f.debug_list().entries(self.0.keys()).finish()
    }
}

/// Returns whether the value of this variable of an object store is a path. Any other value may be a secret.
#[must_use]
pub fn names_file(variable: &str) -> bool {
    ["AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"].contains(&variable)
}

/// A file with the variables of an object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentFile(PathBuf);

/// The variables that this process has read.
static VARIABLES: LazyLock<Mutex<HashMap<PathBuf, Arc<Variables>>>> = LazyLock::new(Mutex::default);

impl EnvironmentFile {
    /// Refers to a file, which need not exist. The path becomes independent of the working directory.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the variables. Each process reads the file once, since it may be unable to read it later.
    ///
    /// # Errors
    /// [`EnvironmentFileError`].
    pub(crate) fn variables(&self) -> Result<Arc<Variables>, EnvironmentFileError> {
        let mut known = VARIABLES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(variables) = known.get(&self.0) {
            return Ok(variables.clone());
        }
        let variables = Arc::new(read(&self.0)?);
        known.insert(self.0.clone(), variables.clone());
        Ok(variables)
    }

    /// Reads the variables, which this process keeps, and returns the files that they name, such as certificates.
    ///
    /// # Errors
    /// [`EnvironmentFileError`].
    pub fn read(&self) -> Result<Vec<PathBuf>, EnvironmentFileError> {
        let variables = self.variables()?;
        let values = variables.0.iter().filter(|(name, _)| names_file(name)).map(|(_, value)| PathBuf::from(value));
        Ok(values.filter(|path| path.is_absolute()).collect())
    }
}

/// Reads the variables of a file.
fn read(path: &Path) -> Result<Variables, EnvironmentFileError> {
    let own = |path: &Path| path.to_owned();
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => EnvironmentFileError::Missing { path: own(path) },
        _ => EnvironmentFileError::Read { path: own(path), source },
    };
    // A pipe must not block.
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let file = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(EnvironmentFileError::NotAFile { path: own(path) });
    }
    if metadata.uid() != 0 && metadata.uid() != geteuid().as_raw() {
        return Err(EnvironmentFileError::OfOtherUser { path: own(path), owner: metadata.uid() });
    }
    if metadata.mode() & OTHERS != 0 {
        return Err(EnvironmentFileError::AccessibleByOthers { path: own(path), mode: metadata.mode() });
    }
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(EnvironmentFileError::TooLong { path: own(path) });
    }
    parse(&text).map_err(|(line, what)| EnvironmentFileError::Line { path: own(path), line, what })
}

/// Parses lines `KEY=value`. Ignores empty lines and those that begin with `#`. An error is the number of a line, and what
/// is wrong with it.
fn parse(text: &str) -> Result<Variables, (usize, String)> {
    let mut variables = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |what: String| Err((number, what));
        let Some((key, value)) = line.split_once('=') else { return wrong("it is not KEY=value".into()) };
        let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if !key.starts_with(PREFIX) || !key.chars().all(is_name) {
            return wrong(format!("only variables whose names begin with {PREFIX} can be set"));
        }
        if value.is_empty() || value.contains(['"', '\'', '\\', '\0']) || value.contains(char::is_whitespace) {
            return wrong(format!(
                "the value of {key} is empty, or has spaces, quotes or backslashes; write it without them"
            ));
        }
        if variables.insert(key.to_owned(), value.to_owned()).is_some() {
            return wrong(format!("{key} is set twice"));
        }
    }
    Ok(Variables(variables))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn variables_are_parsed_and_wrong_lines_are_rejected() {
        let variables = parse("# of the store\n\nAWS_REGION=default\n AWS_SECRET_ACCESS_KEY=a/b+c=\n").unwrap();
        let expected = [("AWS_REGION", "default"), ("AWS_SECRET_ACCESS_KEY", "a/b+c=")];
        assert!(variables.0.iter().map(|(key, value)| (&**key, &**value)).eq(expected), "{variables:?}");
        for (text, wrong_line, named) in [
            ("AWS_REGION", 1, "it is not KEY=value"),
            ("AWS_REGION=a\nLD_PRELOAD=/x.so", 2, "only variables"),
            ("export AWS_REGION=a", 1, "only variables"),
            ("AWS_REGION=\"a\"", 1, "the value of AWS_REGION"),
            ("AWS_REGION=", 1, "the value of AWS_REGION"),
            ("AWS_REGION=a\nAWS_REGION=b", 2, "AWS_REGION is set twice"),
        ] {
            let (line, what) = parse(text).unwrap_err();
            assert!(line == wrong_line && what.contains(named), "{text}: {line}: {what}");
        }
    }

    #[test]
    fn a_file_that_others_can_access_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s3.env");
        fs::write(&path, "AWS_REGION=default\n").unwrap();
        for mode in [0o640, 0o604, 0o620] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{mode:o}: {error}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).unwrap().0.len(), 1);
        assert!(matches!(read(directory.path()), Err(EnvironmentFileError::NotAFile { .. })));
        let missing = read(&directory.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("there is no environment file"), "{missing}");
    }

    #[test]
    fn a_file_is_read_once_and_no_value_is_printed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s3.env");
        let file = EnvironmentFile::new(&path);
        assert!(file.variables().is_err());
        fs::write(&path, "AWS_SECRET_ACCESS_KEY=hidden\nAWS_CA_BUNDLE=/etc/ca.pem\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(file.read().unwrap(), [PathBuf::from("/etc/ca.pem")]);
        fs::remove_file(&path).unwrap();
        let variables = file.variables().unwrap();
        assert_eq!(variables.0["AWS_SECRET_ACCESS_KEY"], "hidden");
        assert!(!format!("{variables:?}").contains("hidden"), "{variables:?}");
    }
}
