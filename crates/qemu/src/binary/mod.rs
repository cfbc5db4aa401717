//! The features of a QEMU binary: queried from the binary itself, before anything depends on them.

mod cache;

use crate::cpu::{self, Features};
use crate::qmp::{Qmp, QmpError, Version};
use crate::syntax::Syntax;
use cache::DependencyRecorder;
pub(crate) use cache::program_file;
use rekindle_kernel::output::waiting_in;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::die_with_starter;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Limit for the greeting. It usually takes 0.1 s; a loaded machine gets a hundred times that.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of the kept standard error output, in bytes.
const MAX_OUTPUT_BYTES: usize = 1 << 16;

/// Why a binary cannot be used as a QEMU.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    #[error("cannot run {}: give the path of a qemu-system-x86_64 that exists and may be executed", path.display())]
    Run {
        /// Path as the caller gave it.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} does not behave like a QEMU system emulator{}", path.display(), first_line(output))]
    NotQemu {
        /// Path as the caller gave it.
        path: PathBuf,
        output: String,
        #[source]
        source: QmpError,
    },
}

fn first_line(output: &str) -> String {
    match output.lines().map(str::trim).find(|line| !line.is_empty()) {
        Some(line) => format!(" (it printed: {line})"),
        None => String::new(),
    }
}

/// A QEMU binary and its features.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binary {
    /// Path as the caller gave it.
    pub path: PathBuf,
    pub version: Version,
    /// Machine types, including aliases.
    pub machines: BTreeSet<String>,
    /// Pairs of an alias and its machine type, e.g. `q35` and `pc-q35-10.0`.
    pub aliases: Vec<(String, String)>,
    pub cpus: BTreeSet<String>,
    pub devices: BTreeSet<String>,
    pub commands: BTreeSet<String>,
    /// Spelling of the options.
    pub syntax: Syntax,
    /// Whether the answers come from the cache: see [`Binary::probe_cached`].
    #[serde(skip)]
    pub is_cached: bool,
}

/// An entry of a list of QEMU's.
#[derive(Deserialize)]
struct Entry {
    name: String,
    alias: Option<String>,
}

impl Binary {
    /// Starts the QEMU at `path` with an empty machine, queries its features, and ends it.
    ///
    /// A name without a slash is looked up in `PATH`. Takes about 0.1 s.
    ///
    /// # Errors
    /// [`BinaryError`]: missing, not executable, not a QEMU.
    pub fn probe(path: &Path) -> Result<Self, BinaryError> {
        Ok(Self::probe_with_dependencies(path)?.0)
    }

    fn probe_with_dependencies(path: &Path) -> Result<(Self, DependencyRecorder), BinaryError> {
        let mut dependencies = DependencyRecorder::begin(path);
        let binary = with_machine(path, &["-machine", "none", "-accel", "tcg"], |qmp, process| {
            let binary = Self::query(path, qmp);
            dependencies.record(process);
            binary
        })?;
        Ok((binary, dependencies))
    }

    /// Returns the CPU features that a guest would see on this host. Starts a QEMU with the machine and ends it.
    ///
    /// # Errors
    /// [`BinaryError`] with QEMU's message, e.g. if this host cannot provide the machine or the CPU model.
    pub fn cpu_features(&self, machine: &str, accelerator: &str, cpu_model: &str) -> Result<Features, BinaryError> {
        let mut arguments = vec!["-machine", machine, "-accel", accelerator];
        if !cpu_model.is_empty() {
            arguments.extend(["-cpu", cpu_model]);
        }
        with_machine(&self.path, &arguments, |mut qmp, _| cpu::features(&mut qmp))
    }

    fn query(path: &Path, mut qmp: Qmp) -> Result<Self, QmpError> {
        let names = |list: Vec<Entry>| list.into_iter().map(|entry| entry.name).collect::<BTreeSet<_>>();
        let machines: Vec<Entry> = qmp.execute("query-machines", ())?;
        let alias = |machine: &Entry| Some((machine.alias.clone()?, machine.name.clone()));
        let aliases: Vec<_> = machines.iter().filter_map(alias).collect();
        let mut machines = names(machines);
        machines.extend(aliases.iter().map(|(alias, _)| alias.clone()));
        let cpus = names(qmp.execute("query-cpu-definitions", ())?);
        let commands = names(qmp.execute("query-commands", ())?);
        let devices = names(qmp.execute("qom-list-types", json!({"implements": "device", "abstract": false}))?);
        let syntax = Syntax::query(&mut qmp)?;
        let (path, version, is_cached) = (path.to_owned(), qmp.version().clone(), false);
        Ok(Self { path, version, machines, aliases, cpus, devices, commands, syntax, is_cached })
    }

    /// Returns the versioned machine type that `machine` stands for in this QEMU: `machine` itself, unless it is an
    /// alias.
    pub fn pinned_machine<'a>(&'a self, machine: &'a str) -> &'a str {
        self.aliases.iter().find(|(alias, _)| alias == machine).map_or(machine, |(_, name)| name)
    }

    /// Returns whether this QEMU can write its device state without RAM in one command.
    pub fn saves_device_state(&self) -> bool {
        self.commands.contains("xen-save-devices-state")
    }
}

/// Starts the QEMU at `path` with the machine of these arguments, which does not run, and ends it after `query`.
fn with_machine<T>(
    path: &Path,
    machine: &[&str],
    query: impl FnOnce(Qmp, io::Result<Process>) -> Result<T, QmpError>,
) -> Result<T, BinaryError> {
    let failed = |source: io::Error| BinaryError::Run { path: path.to_owned(), source };
    let (own_end, qemu_end) = UnixStream::pair().map_err(failed)?;
    let second_qemu_end = qemu_end.try_clone().map_err(failed)?;
    let mut command = Command::new(path);
    command
        .args(machine)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-S", "-qmp", "stdio"])
        .stdin(Stdio::from(OwnedFd::from(qemu_end)))
        .stdout(Stdio::from(OwnedFd::from(second_qemu_end)))
        .stderr(Stdio::piped());
    let child = die_with_starter(&mut command).spawn().map_err(failed)?;
    // Close our copies of the QEMU's end of the socket: they would hide that the QEMU has ended.
    drop(command);
    let process = Process::of(child.id());
    let answers = Qmp::over(own_end, GREETING_TIMEOUT).and_then(|qmp| query(qmp, process));
    let output = end(child);
    answers.map_err(|source| BinaryError::NotQemu { path: path.to_owned(), output, source })
}

/// Ends the child and returns its standard error output.
fn end(mut child: Child) -> String {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
    if let Err(e) = child.wait() {
        tracing::debug!("cannot reap the probed binary: {e}");
    }
    // A process that the child started may still have the other end of the pipe open.
    let output = child.stderr.take().map(|mut pipe| waiting_in(&mut pipe, MAX_OUTPUT_BYTES)).unwrap_or_default();
    String::from_utf8_lossy(&output).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_missing_binary_and_one_that_is_not_executable_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qemu-missing");
        let e = Binary::probe(&path).unwrap_err();
        assert!(matches!(&e, BinaryError::Run { source, .. } if source.kind() == io::ErrorKind::NotFound));
        assert!(e.to_string().contains("qemu-missing"), "{e}");
        fs::write(&path, "#!/bin/sh\n").unwrap();
        let e = Binary::probe(&path).unwrap_err();
        assert!(matches!(&e, BinaryError::Run { source, .. } if source.kind() == io::ErrorKind::PermissionDenied));
    }

    #[test]
    fn a_binary_that_leaves_a_process_behind_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("not-qemu");
        fs::write(&path, "#!/bin/sh\nsleep 1000 <&- >&- &\necho $! $$ >&2\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let e = Binary::probe(&path).unwrap_err().to_string();
        let pid = e.split("it printed: ").nth(1).and_then(|text| text.split(' ').next()?.parse().ok()).unwrap();
        Process::of(pid).unwrap().kill().unwrap();
    }

    #[test]
    fn a_program_that_is_no_qemu_is_reported_with_its_own_output() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("not-qemu");
        fs::write(&path, "#!/bin/sh\necho I am not the one >&2\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let e = Binary::probe(&path).unwrap_err();
        assert!(e.to_string().contains("I am not the one"), "{e}");
    }
}
