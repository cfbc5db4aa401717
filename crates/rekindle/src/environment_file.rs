//! `--environment-file`: variables for an object store, from a file that only its owner can read.
//!
//! The process replaces itself by one whose environment has the variables, so that its helpers (protector, pager) and
//! every library find them where they always are.

use crate::cli::ENVIRONMENT_FILE;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::env;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Prefix of the variables that a file may set. Others would change how programs are loaded or found.
const PREFIX: &str = "AWS_";
const MAX_BYTES: u64 = 64 << 10;
/// Permissions of users other than the owner.
const OTHERS: u32 = 0o077;

/// Ensures that the environment has the variables of `file`. Returns only if it has them.
pub fn apply(file: &Path) -> Result<()> {
    let name = || file.display().to_string();
    let path = std::path::absolute(file).with_context(name)?;
    let mut variables: BTreeMap<_, _> =
        read(&path).with_context(name)?.into_iter().map(|(key, value)| (key, value.into())).collect();
    variables.insert(ENVIRONMENT_FILE.to_owned(), path.into_os_string());
    if variables.iter().all(|(key, value)| env::var_os(key).as_ref() == Some(value)) {
        return Ok(());
    }
    let program = env::current_exe().context("cannot find the program of this process")?;
    let mut arguments = env::args_os();
    let mut command = Command::new(program);
    if let Some(own_name) = arguments.next() {
        command.arg0(own_name);
    }
    // Returns only if it fails.
    let error = command.args(arguments).envs(variables).exec();
    Err(error).context("cannot restart this process with the variables")
}

/// Reads the variables of a file.
fn read(path: &Path) -> Result<BTreeMap<String, String>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let own_user = rustix::process::geteuid().as_raw();
    if !metadata.is_file() {
        bail!("it is not a file");
    }
    if metadata.uid() != 0 && metadata.uid() != own_user {
        bail!("it belongs to user {}; to fix this: chown root {}", metadata.uid(), path.display());
    }
    if metadata.mode() & OTHERS != 0 {
        bail!("other users can access it, and it has credentials; to fix this: chmod 600 {}", path.display());
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    parse(&text)
}

/// Parses lines `KEY=value`. Ignores empty lines and those that begin with `#`.
fn parse(text: &str) -> Result<BTreeMap<String, String>> {
    let mut variables = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { bail!("line {number}: it is not KEY=value") };
        let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if !key.starts_with(PREFIX) || !key.chars().all(is_name) {
            bail!("line {number}: only variables whose names begin with {PREFIX} can be set");
        }
        if value.is_empty() || value.contains(['"', '\'', '\\', '\0']) || value.contains(char::is_whitespace) {
            bail!(
                "line {number}: the value of {key} is empty, or has spaces, quotes or backslashes; write it without them"
            );
        }
        if variables.insert(key.to_owned(), value.to_owned()).is_some() {
            bail!("line {number}: {key} is set twice");
        }
    }
    Ok(variables)
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
        assert!(variables.iter().map(|(key, value)| (&**key, &**value)).eq(expected), "{variables:?}");
        for (text, named) in [
            ("AWS_REGION", "line 1: it is not KEY=value"),
            ("AWS_REGION=a\nLD_PRELOAD=/x.so", "line 2: only variables"),
            ("export AWS_REGION=a", "line 1: only variables"),
            ("AWS_REGION=\"a\"", "the value of AWS_REGION"),
            ("AWS_REGION=", "the value of AWS_REGION"),
            ("AWS_REGION=a\nAWS_REGION=b", "line 2: AWS_REGION is set twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
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
        assert_eq!(read(&path).unwrap().len(), 1);
        assert!(read(directory.path()).is_err());
    }
}
