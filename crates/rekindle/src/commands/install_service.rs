//! `rekindle protect --install-service`: writes the settings file of a VM, and starts the service that protects it.

use super::existing_run_dir;
use super::store::credentials;
use crate::cli::{DiskRule, Protect};
use crate::output::{Output, Usage};
use anyhow::{Context, Result, anyhow};
use rekindle_kernel::systemd;
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::write_atomically;
use serde_json::json;
use std::env;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use toml::{Table, Value};

const STORE: &str = "store";

pub fn install(output: &Output, host: &Host, arguments: &Protect) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let options = &arguments.merged.options;
    existing_run_dir(host, name)?;
    let unit = format!("rekindle-protect@{name}.service");
    check_systemd(name, options, &unit)?;
    check_environment(arguments)?;
    let Some(file) = &arguments.merged.file else {
        return Err(anyhow!("HOME is not set, so there is no directory for the settings"));
    };
    check_same_store(file, &arguments.merged.in_file, options, arguments.force)?;
    let text = settings_text(name, options)?;
    let steps = [format!("systemctl enable {unit}"), format!("systemctl restart {unit}")];
    if arguments.dry_run {
        let created = if arguments.create_store {
            format!("create the store {}\n", arguments.checkpoints.store)
        } else {
            String::new()
        };
        let plan = format!("{created}write {}:\n{}\nrun: {}", file.display(), indented(&text), steps.join(" && "));
        output.result(&json!({"name": name, "file": file, "text": text, "commands": steps}), plan)?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.create_store {
        create_store(arguments)?;
    }
    write(file, &text).with_context(|| format!("the settings cannot be written to {}", file.display()))?;
    for verb in ["enable", "restart"] {
        systemd::systemctl(&[verb, &unit]).with_context(|| {
            format!(
                "{} is written, but `systemctl {verb} {unit}` has failed; `journalctl -u {unit}` has the cause; to undo: {}",
                file.display(),
                undo(arguments, &unit, file).join("; ")
            )
        })?;
    }
    let undo = undo(arguments, &unit, file);
    let done = format!(
        "{name}: protected by {unit}, also after a boot of the host\n  settings: {}\n  state:    systemctl status {unit}\n  \
         to undo:  {}",
        file.display(),
        undo.join(" && ")
    );
    output.result(&json!({"name": name, "file": file, "unit": unit, "undo": undo}), done)?;
    Ok(ExitCode::SUCCESS)
}

/// Rejects a host or user without the service. The error has the command to use instead.
fn check_systemd(name: &str, options: &Table, unit: &str) -> Result<()> {
    let instead = command_line(name, options);
    if !systemd::is_running() {
        return Err(anyhow!(
            "systemd does not manage this host, so the service cannot be installed; have your service manager run and restart \
             this command: {instead}"
        ));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(anyhow!(
            "the service protects VMs of root, so only root can install it (sudo); for the VM of another user, write a unit as in \
             docs/without-root.md, with this command: {instead}"
        ));
    }
    let state = systemd::show(unit, &["LoadState"]).context("systemd does not report the state of the service")?;
    match state.get("LoadState").map(String::as_str) {
        Some("loaded") => Ok(()),
        state => Err(anyhow!(
            "systemd cannot load {unit} ({}); install Rekindle's units (`make install`, or the package), and run: systemctl \
             daemon-reload",
            state.unwrap_or("unknown")
        )),
    }
}

/// Rejects what depends on variables of this shell, which the service does not have.
fn check_environment(arguments: &Protect) -> Result<(), Usage> {
    let of_host = ["REKINDLE_RUN_DIR", "REKINDLE_HOST_CONFIG"].into_iter().find(|name| env::var_os(name).is_some());
    if let Some(variable) = of_host {
        return Err(Usage(format!(
            "{variable} is set, which the service would not have, so it would not find this VM; unset it, or write a unit with it as in \
             docs/without-root.md"
        )));
    }
    let checkpoints = &arguments.checkpoints;
    let needs_file =
        matches!(checkpoints.store, StoreUrl::Objects(_)) && checkpoints.credentials.environment_file.is_none();
    let of_store = env::vars_os().find(|(name, _)| name.as_encoded_bytes().starts_with(b"AWS_"));
    match of_store.filter(|_| needs_file) {
        Some((variable, _)) => Err(Usage(format!(
            "{} is set, which the service would not have; write the variables of the store to a file, and add --environment-file FILE",
            variable.display()
        ))),
        None => Ok(()),
    }
}

/// Rejects to replace settings for another store.
fn check_same_store(file: &Path, in_file: &Table, options: &Table, force: bool) -> Result<(), Usage> {
    match in_file.get(STORE).and_then(Value::as_str) {
        Some(store) if !force && options.get(STORE).and_then(Value::as_str) != Some(store) => Err(Usage(format!(
            "{} names another store, {store}; nothing was changed. To protect the VM into the new store from now on, add --force; the \
             old checkpoints stay where they are",
            file.display()
        ))),
        _ => Ok(()),
    }
}

fn create_store(arguments: &Protect) -> Result<()> {
    let checkpoints = &arguments.checkpoints;
    let credentials = credentials(&checkpoints.credentials).map(|credentials| rekindle_store::Credentials {
        // A new store has nothing to encrypt: the first checkpoint does.
        keys: None,
        ..credentials
    });
    match admin::init(&checkpoints.store, credentials.as_ref()) {
        Ok(()) | Err(StoreError::Exists { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Returns the content of a settings file.
fn settings_text(name: &str, options: &Table) -> Result<String> {
    let options = toml::to_string(options).context("the options cannot be written as TOML")?;
    Ok(format!(
        "# Settings of `rekindle protect {name}`, also in rekindle-protect@{name}.service. The keys are the options of\n\
         # rekindle-protect(1) without the dashes. A change takes effect when the service is restarted.\n{options}"
    ))
}

/// Writes a settings file that only root can read: it may name keys.
fn write(file: &Path, text: &str) -> Result<()> {
    if let Some(directory) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    // The permissions of an existing file would be those of the new one only by chance.
    let _ = fs::remove_file(file.with_extension("new"));
    Ok(write_atomically(file, text.as_bytes())?)
}

/// Returns the commands that undo the installation.
fn undo(arguments: &Protect, unit: &str, file: &Path) -> Vec<String> {
    let mut commands =
        vec![format!("systemctl disable --now {unit}"), format!("rm {}", quoted(&file.display().to_string()))];
    if matches!(arguments.disk, Some(DiskRule::Overlays)) {
        commands.push(format!("rekindle detach {}", arguments.name));
    }
    if arguments.checkpoints.output_commit {
        commands.push(format!("rekindle release {}", arguments.name));
    }
    commands
}

/// Returns the command that protects the VM without a service.
fn command_line(name: &str, options: &Table) -> String {
    let mut words = format!("rekindle protect {name}");
    for (key, value) in options {
        match value {
            Value::Boolean(true) => words += &format!(" --{key}"),
            Value::String(text) => words += &format!(" --{key} {}", quoted(text)),
            other => words += &format!(" --{key} {other}"),
        }
    }
    words
}

/// Quotes a word for a shell, if that is necessary.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/.:_-=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn the_command_of_a_host_without_systemd_has_all_options() {
        let options =
            table("store = \"/srv/a b\"\nkeep = 3\nevery = \"2s\"\noutput-commit = true\nkey-command = \"it's\"\n");
        assert_eq!(
            command_line("web", &options),
            "rekindle protect web --every 2s --keep 3 --key-command 'it'\\''s' --output-commit --store '/srv/a b'"
        );
    }

    #[test]
    fn settings_of_another_store_are_replaced_only_by_force() {
        let file = Path::new("/etc/rekindle/protect/web.toml");
        let (old, new) = (table("store = \"/srv/old\""), table("store = \"/srv/new\"\nevery = \"5s\""));
        assert!(check_same_store(file, &Table::new(), &new, false).is_ok());
        assert!(check_same_store(file, &new, &new, false).is_ok());
        assert!(check_same_store(file, &old, &new, true).is_ok());
        let e = check_same_store(file, &old, &new, false).unwrap_err().to_string();
        assert!(e.contains("/srv/old") && e.contains("--force"), "{e}");
    }

    #[test]
    fn a_settings_file_is_written_for_its_owner_only_and_is_toml() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("protect/web.toml");
        let options = table("store = \"/srv/web\"\nkeep = 3\n");
        for _ in 0..2 {
            write(&file, &settings_text("web", &options).unwrap()).unwrap();
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
        assert_eq!(table(&fs::read_to_string(&file).unwrap()), options);
    }
}
