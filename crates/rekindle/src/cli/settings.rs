//! The settings file of `rekindle protect`: options that need not be on the command line.
//!
//! The keys of the file are the long names of the options, so each option is declared once. The options of the file are
//! put on the command line, except those that the command line sets, and clap then checks all of them together.

use super::Cli;
use super::store::StoreCredentials;
use crate::output::Usage;
use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, CommandFactory};
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use rekindle_vm::host::protect_settings_file;
use std::any::TypeId;
use std::error::Error;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Heading of the options that a settings file cannot have: those for a single start of a protector.
pub const COMMAND_LINE_ONLY: &str = "Options for the command line only";
const PROTECT: &str = "protect";
const MAX_BYTES: u64 = 64 << 10;

/// The settings of a protector.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The file that the service of the VM reads; it need not exist. `None`: this user has no directory for it.
    pub file: Option<PathBuf>,
    /// What the file has.
    pub in_file: Table,
    /// The options of this start that a settings file can have, without defaults. Paths are absolute.
    pub options: Table,
}

/// A command line with the options of a settings file.
pub(super) struct MergedWords {
    pub words: Vec<OsString>,
    /// The settings file, if it exists.
    pub read_file: Option<PathBuf>,
    pub settings: Settings,
}

/// Adds the options of the settings file to the words of a command line, if they are of `rekindle protect`.
pub(super) fn merge(mut words: Vec<OsString>) -> Result<MergedWords, Usage> {
    let subcommand = words.iter().skip(1).position(|word| !word.as_encoded_bytes().starts_with(b"-"));
    let subcommand = subcommand.map(|position| position + 1).filter(|position| words[*position] == PROTECT);
    // A wrong command line is reported when it is parsed again.
    let matches = subcommand.and_then(|_| Cli::command().ignore_errors(true).try_get_matches_from(&words).ok());
    let given = matches.as_ref().and_then(|matches| matches.subcommand_matches(PROTECT));
    // A wrong option before this one leaves it without its default.
    let given = given.filter(|given| given.get_one::<bool>("no_settings") != Some(&true));
    let name = given.and_then(|given| given.get_one::<Name>("name"));
    let (Some(subcommand), Some(given), Some(name)) = (subcommand, given, name) else {
        return Ok(MergedWords { words, read_file: None, settings: Settings::default() });
    };
    let named = given.get_one::<PathBuf>("settings").cloned();
    let file = named.clone().or_else(|| protect_settings_file(name));
    let in_file = match &file {
        Some(path) => read(path).map_err(|why| Usage(format!("{}: {why}", path.display())))?,
        None => None,
    };
    if let (Some(path), None) = (&named, &in_file) {
        return Err(Usage(format!(
            "there is no settings file {}; correct --settings, or leave it out",
            path.display()
        )));
    }
    let read_file = file.clone().filter(|_| in_file.is_some());
    let in_file = in_file.unwrap_or_default();
    if let Some(path) = &file {
        let added = words_of_file(&in_file, given).map_err(|why| Usage(format!("{}: {why}", path.display())))?;
        words.splice(subcommand..=subcommand, added);
    }
    Ok(MergedWords { words, read_file, settings: Settings { file, in_file, options: Table::new() } })
}

/// Returns the options of a parsed command line that a settings file can have, except defaults.
pub(super) fn options_of(matches: &ArgMatches) -> Result<Table, Usage> {
    let protect = protect_command();
    let mut options = Table::new();
    for arg in protect.get_arguments().filter(|arg| is_in_files(arg) && is_given(matches, arg)) {
        let name = arg.get_long().unwrap_or_default();
        let value = if is_flag(arg) {
            Value::Boolean(true)
        } else {
            let raw = matches.get_raw(arg.get_id().as_str()).and_then(|mut values| values.next());
            let Some(text) = raw.and_then(|raw| raw.to_str()) else {
                return Err(Usage(format!("--{name} is not in UTF-8, which a settings file requires")));
            };
            let parser = arg.get_value_parser();
            match text.parse() {
                Ok(number) if is_number(parser) => Value::Integer(number),
                _ => Value::String(absolute(parser, text)),
            }
        };
        options.insert(name.to_owned(), value);
    }
    Ok(options)
}

fn protect_command() -> Command {
    let commands = Cli::command();
    commands.find_subcommand(PROTECT).cloned().unwrap_or_default()
}

/// Returns whether a settings file can have this option.
fn is_in_files(arg: &Arg) -> bool {
    arg.get_long().is_some() && arg.get_help_heading() != Some(COMMAND_LINE_ONLY)
}

fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

fn is_given(matches: &ArgMatches, arg: &Arg) -> bool {
    let source = matches.value_source(arg.get_id().as_str());
    matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

fn is_number(parser: &ValueParser) -> bool {
    let kind = parser.type_id();
    kind == TypeId::of::<u32>() || kind == TypeId::of::<u64>()
}

/// Returns the value with an absolute path, if it is a path.
fn absolute(parser: &ValueParser, text: &str) -> String {
    let kind = parser.type_id();
    let path = match text.parse() {
        Ok(StoreUrl::Directory(path)) if kind == TypeId::of::<StoreUrl>() => path,
        _ if kind == TypeId::of::<PathBuf>() => PathBuf::from(text),
        _ => return text.to_owned(),
    };
    let path = std::path::absolute(&path).unwrap_or(path);
    path.to_str().map_or_else(|| text.to_owned(), str::to_owned)
}

/// Returns `protect` and the options of a settings file as words of a command line, except those that `given` sets or excludes.
fn words_of_file(options: &Table, given: &ArgMatches) -> Result<Vec<OsString>, String> {
    let protect = protect_command();
    let mut words = vec![OsString::from(PROTECT)];
    for (key, value) in options {
        let arg = option_named(&protect, key)?;
        let word = word_of(arg, key, value)?;
        let excludes = |one: &Arg, other: &Arg| {
            protect.get_arg_conflicts_with(one).iter().any(|excluded| excluded.get_id() == other.get_id())
        };
        let is_overridden = protect.get_arguments().filter(|other| is_given(given, other)).any(|other| {
            other.get_id() == arg.get_id() || (is_in_files(other) && (excludes(arg, other) || excludes(other, arg)))
        });
        words.extend(word.filter(|_| !is_overridden));
    }
    Ok(words)
}

/// Returns the option with the name `key`.
fn option_named<'a>(protect: &'a Command, key: &str) -> Result<&'a Arg, String> {
    let named = |name: &str| protect.get_arguments().find(|arg| arg.get_long() == Some(name));
    if let Some(arg) = named(key).filter(|arg| is_in_files(arg)) {
        return Ok(arg);
    }
    if named(key).is_some() {
        return Err(format!("`{key}` is for the command line only; remove it from the file"));
    }
    let with_dashes = key.replace('_', "-");
    if named(&with_dashes).is_some_and(is_in_files) {
        return Err(format!("unknown key `{key}`; write `{with_dashes}`"));
    }
    let known = protect.get_arguments().filter(|arg| is_in_files(arg)).filter_map(Arg::get_long);
    let known: Vec<_> = known.collect();
    Err(format!("unknown key `{key}`; remove it, or use one of: {}", known.join(", ")))
}

/// Returns an option of a settings file as a word of a command line; `None` for a flag that is off.
fn word_of(arg: &Arg, key: &str, value: &Value) -> Result<Option<OsString>, String> {
    if is_flag(arg) {
        return match value {
            Value::Boolean(is_on) => Ok(is_on.then(|| format!("--{key}").into())),
            _ => Err(format!("`{key}` must be true or false, without quotes")),
        };
    }
    let parser = arg.get_value_parser();
    let text = match value {
        Value::Integer(number) if is_number(parser) => number.to_string(),
        Value::String(text) if !is_number(parser) => text.clone(),
        _ if is_number(parser) => return Err(format!("`{key}` must be a number, without quotes")),
        _ => return Err(format!("`{key}` must be a text in quotes, such as {key} = \"...\"")),
    };
    check_value(parser, &text).map_err(|why| format!("`{key}`: {why}"))?;
    if absolute(parser, &text) != text && !text.starts_with("file:") {
        return Err(format!(
            "`{key}` must be an absolute path: the service has another working directory than you; write {key} = {:?}",
            absolute(parser, &text)
        ));
    }
    Ok(Some(format!("--{key}={text}").into()))
}

/// Checks a value as clap does for the option, but without its name on the command line.
fn check_value(parser: &ValueParser, text: &str) -> Result<(), String> {
    let alone = Arg::new("value").allow_hyphen_values(true).value_parser(parser.clone());
    let parsed = Command::new("settings").no_binary_name(true).arg(alone).try_get_matches_from([text]);
    let Err(e) = parsed else { return Ok(()) };
    match (e.source(), e.get(ContextKind::ValidValue)) {
        (Some(why), _) => Err(why.to_string()),
        (None, Some(ContextValue::Strings(valid))) => Err(format!("`{text}` is not one of: {}", valid.join(", "))),
        _ => Err(format!("`{text}` is not valid")),
    }
}

/// Reads a settings file. `None`: there is none.
fn read(path: &Path) -> Result<Option<Table>, String> {
    // A pipe must not block.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("cannot be read: {e}")),
    };
    let metadata = file.metadata().map_err(|e| format!("cannot be read: {e}"))?;
    if !metadata.is_file() {
        return Err("is not a file".into());
    }
    if metadata.uid() != 0 && metadata.uid() != rustix::process::geteuid().as_raw() {
        let why = format!("belongs to user {}, which could change what is run here", metadata.uid());
        return Err(format!("{why}; correct that: chown root {}", path.display()));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o022 != 0 {
        let why = format!("other users can write to it (mode {mode:03o}), and so choose what is run here");
        return Err(format!("{why}; correct that: chmod 600 {}", path.display()));
    }
    let mut text = String::new();
    let length = file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|e| format!("cannot be read: {e}"))?;
    if length as u64 > MAX_BYTES {
        return Err(format!("is longer than the {MAX_BYTES} bytes that settings can have"));
    }
    let table: Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    let credentials = StoreCredentials::augment_args(Command::new("credentials"));
    let names_keys = credentials.get_arguments().filter_map(Arg::get_long).find(|name| table.contains_key(*name));
    match names_keys {
        Some(key) if mode & 0o077 != 0 => Err(format!(
            "other users can read it (mode {mode:03o}), and it has `{key}`; correct that: chmod 600 {}",
            path.display()
        )),
        _ => Ok(Some(table)),
    }
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests")]
mod tests {
    use super::*;
    use crate::cli::{Command as Subcommand, Protect};
    use clap::FromArgMatches;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    /// A settings file with mode 600. Removed on drop.
    struct File(tempfile::TempDir);

    impl File {
        fn new(text: &str) -> Self {
            let file = Self(tempfile::tempdir().unwrap());
            fs::write(file.path(), text).unwrap();
            file.with_mode(0o600)
        }

        fn with_mode(self, mode: u32) -> Self {
            fs::set_permissions(self.path(), Permissions::from_mode(mode)).unwrap();
            self
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("web.toml")
        }

        /// Merges the file and the words of `rekindle protect web`.
        fn merge(&self, words: &[&str]) -> Result<MergedWords, Usage> {
            let program = ["rekindle", "--json", "protect", "web", "--settings"].map(OsString::from);
            let words = words.iter().map(OsString::from);
            merge(program.into_iter().chain([self.path().into_os_string()]).chain(words).collect())
        }

        /// Returns the arguments, and what `--install-service` would write.
        fn parse(&self, words: &[&str]) -> Result<(Protect, Table), String> {
            let merged = self.merge(words).unwrap_or_else(|e| panic!("{e}"));
            let matches = Cli::command().try_get_matches_from(merged.words).map_err(|e| e.to_string())?;
            let options = options_of(matches.subcommand().unwrap().1).unwrap_or_else(|e| panic!("{e}"));
            match Cli::from_arg_matches(&matches).unwrap().command {
                Subcommand::Protect(protect) => Ok((protect, options)),
                other => panic!("{other:?}"),
            }
        }

        fn error(&self) -> String {
            let error = self.merge(&[]).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.starts_with(&format!("{}: ", self.path().display())), "{error}");
            error
        }
    }

    const ALL_KINDS: &str = "\
        store = \"/srv/web\"\nevery = \"5s\"\nkeep = 3\nkey-file = \"/etc/k\"\noutput-commit = true\ndisk = \"overlays\"\n";

    #[test]
    fn options_of_the_file_hold_unless_the_command_line_has_them() {
        let file = File::new(ALL_KINDS);
        let (protect, options) = file.parse(&[]).unwrap();
        let checkpoints = &protect.checkpoints;
        assert_eq!(checkpoints.store, StoreUrl::Directory("/srv/web".into()));
        assert_eq!((checkpoints.every.as_millis(), checkpoints.keep, checkpoints.output_commit), (5000, 3, true));
        assert_eq!(checkpoints.credentials.key_file.as_deref(), Some(Path::new("/etc/k")));
        assert!(protect.disk.is_some() && protect.max_lag.is_none());
        assert_eq!(options, ALL_KINDS.parse().unwrap());
        let (protect, options) = file.parse(&["--every", "1s", "--store=/srv/other"]).unwrap();
        assert_eq!(protect.checkpoints.store, StoreUrl::Directory("/srv/other".into()));
        assert_eq!((protect.checkpoints.every.as_millis(), protect.checkpoints.keep), (1000, 3));
        assert_eq!(options["every"].as_str(), Some("1s"));
    }

    #[test]
    fn an_option_of_the_command_line_replaces_those_of_the_file_that_it_excludes() {
        let file = File::new(ALL_KINDS);
        let (protect, _) = file.parse(&["--key-command", "vault"]).unwrap();
        let credentials = protect.checkpoints.credentials;
        assert_eq!((credentials.key_file, credentials.key_command.as_deref()), (None, Some("vault")));
        let (protect, _) = file.parse(&["--disk-hook", "true"]).unwrap();
        assert!(protect.disk.is_none() && protect.checkpoints.disk_hook.is_some());
        // Options that clap requires together may be in both places.
        let file = File::new("disk = \"overlays\"\n");
        let (protect, _) = file.parse(&["--store", "/s", "--overlay-dir", "/o", "--count", "1", "--compare"]).unwrap();
        assert!(protect.overlay_dir.is_some() && protect.disk.is_some());
    }

    #[test]
    fn two_options_of_the_file_that_exclude_each_other_are_rejected() {
        let error = File::new("store = \"/s\"\nkey-file = \"/k\"\nkey-command = \"vault\"\n").parse(&[]).unwrap_err();
        assert!(error.contains("--key-command") && error.contains("cannot be used with"), "{error}");
        let error = File::new("every = \"1s\"\n").parse(&[]).unwrap_err();
        assert!(error.contains("--store <URL>"), "{error}");
    }

    #[test]
    fn a_wrong_key_or_value_is_named_with_the_remedy() {
        for (text, expected) in [
            ("stores = \"/s\"\n", "unknown key `stores`; remove it, or use one of: store, key-file, key-command,"),
            ("key_file = \"/k\"\n", "unknown key `key_file`; write `key-file`"),
            ("create-store = true\n", "`create-store` is for the command line only; remove it from the file"),
            ("count = 3\n", "`count` is for the command line only"),
            ("settings = \"/x\"\n", "`settings` is for the command line only"),
            ("name = \"web\"\n", "unknown key `name`"),
            ("json = true\n", "unknown key `json`"),
            ("keep = \"3\"\n", "`keep` must be a number, without quotes"),
            ("keep = 0\n", "`keep`: 0 is not in 1.."),
            ("every = 2\n", "`every` must be a text in quotes"),
            ("every = \"2\"\n", "`every`: "),
            ("policy = \"fast\"\n", "`policy`: there is no policy `fast`; use one of: basic, cow, precopy"),
            ("disk = \"none\"\n", "`disk`: `none` is not one of: crash-consistent, overlays"),
            ("output-commit = \"yes\"\n", "`output-commit` must be true or false, without quotes"),
            ("store = \"checkpoints\"\n", "`store` must be an absolute path"),
            ("store = \"host2:/srv\"\n", "`store`: `host2:/srv` is taken for a directory of host host2"),
            ("key-file = \"key\"\n", "`key-file` must be an absolute path"),
            ("[store]\n", "`store` must be a text in quotes"),
            ("every = \n", "TOML parse error"),
        ] {
            let error = File::new(text).error();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn stores_of_each_kind_are_accepted() {
        for (store, written) in [
            ("/srv/web", "/srv/web"),
            ("file:///srv/web", "/srv/web"),
            ("s3://checkpoints/web", "s3://checkpoints/web"),
        ] {
            let (_, options) = File::new(&format!("store = {store:?}\n")).parse(&[]).unwrap();
            assert_eq!(options["store"].as_str(), Some(written));
        }
        let (_, options) = File::new("").parse(&["--store", "web"]).unwrap();
        let expected = std::env::current_dir().unwrap().join("web");
        assert_eq!(options["store"].as_str().map(Path::new), Some(expected.as_path()));
    }

    #[test]
    fn a_file_that_others_can_change_or_that_shows_them_keys_is_rejected() {
        let error = File::new("store = \"/s\"\n").with_mode(0o622).error();
        assert!(error.contains("other users can write to it (mode 622)") && error.contains("chmod 600"), "{error}");
        for key in ["key-file = \"/k\"", "key-command = \"vault\"", "environment-file = \"/e\""] {
            let error = File::new(key).with_mode(0o644).error();
            let key = key.split(' ').next().unwrap();
            assert!(error.contains(&format!("(mode 644), and it has `{key}`; correct that: chmod 600")), "{error}");
        }
        assert!(File::new("store = \"/s\"\n").with_mode(0o644).merge(&[]).is_ok());
        if rustix::process::geteuid().is_root() {
            let file = File::new("store = \"/s\"\n");
            std::os::unix::fs::chown(file.path(), Some(65534), None).unwrap();
            assert!(file.error().contains("belongs to user 65534"), "{}", file.error());
        }
    }

    #[test]
    fn a_named_file_must_exist_and_other_commands_read_none() {
        let file = File::new("nonsense\n");
        for words in [["rekindle", "restore", "web", "--at", "1"], ["rekindle", "protect", "web", "--no-settings", "x"]]
        {
            let words = words.map(OsString::from).to_vec();
            assert_eq!(merge(words.clone()).ok().map(|merged| merged.words), Some(words));
        }
        assert_eq!(file.merge(&["--no-settings"]).ok().map(|merged| merged.read_file), Some(None));
        fs::remove_file(file.path()).unwrap();
        let error = file.merge(&[]).err().unwrap().to_string();
        assert!(error.starts_with("there is no settings file /"), "{error}");
    }
}
