//! `rekindle ls` and `rekindle show`.

use super::known;
use crate::cli::Show;
use crate::output::{Output, bytes as output_bytes, duration};
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use rekindle_qemu::command::Start;
use rekindle_qemu::vmm::Vmm;
use rekindle_reboot::os::phase::Candidate;
use rekindle_reboot::os::phase::candidates;
use rekindle_vm::error::LifeError;
use rekindle_vm::helpers::{self, HelperStatus};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status;
use rekindle_vm::timeline::{self, Entry};
use serde_json::{Value, json};
use std::fs;
use std::process::ExitCode;

pub fn list(output: &Output) -> Result<ExitCode> {
    let host = Host::open()?;
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(["NAME", "STATUS", "QEMU", "PROCESS", "MEMORY", "MACHINE", "STARTED"]);
    let mut all = Vec::new();
    for name in RunDir::list(&host.root)? {
        let rundir = RunDir::new(&host.root, &name);
        let found = State::read(&rundir).and_then(|state| Ok((state, status::status(&rundir)?)));
        let (state, status) = match found {
            Ok((Some(state), status)) => (state, status),
            // The VM is just being created or removed.
            Ok((None, _)) => continue,
            Err(e) => {
                all.push(json!({"name": name, "error": e.to_string()}));
                table.add_row([name, e.to_string()]);
                continue;
            }
        };
        let version = state.version.as_ref().map(ToString::to_string).unwrap_or_default();
        let pid = qemu(&state).map(|vmm| vmm.pid);
        table.add_row([
            name.clone(),
            status.to_string(),
            version.clone(),
            pid.map(|pid| pid.to_string()).unwrap_or_default(),
            state.definition.memory.to_string(),
            state.hardware.machine.clone(),
            state.attached.as_ref().map_or("rekindle".to_owned(), |attached| format!("attached, {}", attached.starter)),
        ]);
        all.push(json!({"name": name, "status": status, "qemu_version": version, "pid": pid,
            "memory": state.definition.memory, "machine": state.hardware.machine, "attached": state.attached}));
    }
    let text = if all.is_empty() { "no VMs; start one: rekindle run FILE".to_owned() } else { table.trim_fmt() };
    output.result(&all, text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn show(output: &Output, arguments: &Show) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    if arguments.timeline {
        let rundir = known(&host, name)?;
        let entries = timeline::read(&rundir)?;
        output.result(&entries, draw(&entries))?;
        return Ok(ExitCode::SUCCESS);
    }
    let state = State::read(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
    let status = status::status(&rundir)?;
    let definition = state.definition.to_toml().context("the definition cannot be written as TOML")?;
    let mut text = format!("# {name} is {status}\n");
    if let Some(attached) = &state.attached {
        text += &format!("# attached to a QEMU that was started {}\n", attached.starter);
        text += "# the definition below is incomplete; a checkpoint has its whole command line\n";
    }
    if let Some(vmm) = qemu(&state) {
        let version = state.version.as_ref().map(ToString::to_string).unwrap_or_default();
        text += &format!("# QEMU {version}: {} (process {})\n", vmm.binary.display(), vmm.pid);
        text += &match &vmm.monitor {
            Some(monitor) => format!("# monitor: {monitor}\n"),
            None => format!("# sockets: {}\n", vmm.directory.display()),
        };
        text += &format!("# logs: {}\n", rundir.logs().display());
    }
    if let Some(previous) = &state.previous {
        text += &format!("# --rollback goes to {}\n", previous.display());
    }
    let hardware = &state.hardware;
    text += &format!("# pinned: machine {}, cpu {}, accel {}\n", hardware.machine, hardware.cpu, hardware.accel);
    if let Some(generation) = hardware.vm_generation {
        text += &format!("# VM generation ID: {generation}\n");
    }
    if state.attached.is_none() {
        text += &format!("# RAM: {}\n", hardware.ram.path.display());
    }
    for helper in helpers::list(&rundir)? {
        text += &helper_line(&helper);
    }
    for candidate in candidates::list(&host, &rundir, &state) {
        text += &line(&candidate);
    }
    text += &format!("\n{definition}");
    output.result(&description(&host, &state)?, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the line about a process that serves the VM.
fn helper_line(helper: &HelperStatus) -> String {
    let HelperStatus { helper, pid, restarts } = helper;
    let process = pid.map_or_else(|| "missing".to_owned(), |pid| format!("process {pid}"));
    let restarted = match restarts.count {
        0 => String::new(),
        1 => ", restarted once".into(),
        count => format!(", restarted {count} times"),
    };
    let stopped = restarts.abandoned.as_ref().map_or_else(String::new, |why| format!("; no longer restarted: {why}"));
    format!("# helper {helper}: {process}{restarted}{stopped}\n")
}

/// Formats the line about a phase that is or will be saved.
fn line(candidate: &Candidate) -> String {
    let Candidate { name, taken_us, bytes, void } = candidate;
    let age = taken_us.map(|at| format!(", {} old", duration(timeline::host_us().saturating_sub(at))));
    let may = void.as_ref().map_or("may be used".to_owned(), |why| format!("may not be used: {why}"));
    match age {
        Some(age) => format!("# phase {name}: {}{age}; {may}\n", output_bytes(*bytes)),
        None => format!("# phase {name}: {}\n", void.as_deref().unwrap_or_default()),
    }
}

/// Returns the QEMU that runs the guest, or is prepared for it.
fn qemu(state: &State) -> Option<&Vmm> {
    state.vmm.as_ref().or(state.prepared.as_ref().map(|prepared| &prepared.vmm))
}

/// Returns the JSON description of a VM.
pub fn description(host: &Host, state: &State) -> Result<Value> {
    let rundir = RunDir::new(&host.root, &state.hardware.name);
    let directory = rundir.vmm(state.generation);
    // If the binary no longer exists, the syntax of its options does not matter: no QEMU can be started from it.
    let binary = qemu(state).map_or(&state.definition.qemu, |vmm| &vmm.binary);
    let syntax = rundir.binary(binary).map(|binary| binary.syntax).unwrap_or_default();
    Ok(json!({
        "name": state.hardware.name,
        "status": status::status(&rundir)?,
        "run_directory": rundir.path(),
        "logs": rundir.logs(),
        "vmm": state.vmm,
        "attached": state.attached,
        "helpers": helpers::list(&rundir)?,
        "prepared": state.prepared,
        "phases": candidates::list(host, &rundir, state),
        "qemu_version": state.version,
        "previous": state.previous,
        "definition": state.definition,
        "hardware": state.hardware,
        "command_line": state.hardware.arguments(&directory, &rundir.console_log(), Start::Boot, syntax),
        "running_command_line": qemu(state).and_then(|vmm| command_line(vmm.pid)),
    }))
}

/// Returns the arguments of a running process.
fn command_line(pid: u32) -> Option<Vec<String>> {
    let text = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments =
        text.strip_suffix(&[0])?.split(|&byte| byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    Some(arguments.collect::<Vec<_>>())
}

/// Width of the bars in characters.
const WIDTH: u64 = 48;

/// Draws the last operation's steps as bars over time.
fn draw(entries: &[Entry]) -> String {
    let Some(last) = entries.last() else { return "no operation has been done on this VM yet".into() };
    // Find the last operation's first step: its steps follow one another without a gap.
    let mut from = entries.len() - 1;
    while let (Some(before), Some(now)) = (from.checked_sub(1).and_then(|n| entries.get(n)), entries.get(from)) {
        let end = before.start_mono_ns + before.us * 1000;
        if before.operation != now.operation
            || before.phase > now.phase
            || now.start_mono_ns.saturating_sub(end) > 1_000_000_000
        {
            break;
        }
        from -= 1;
    }
    let steps = entries.get(from..).unwrap_or_default();
    let begin = steps.first().map_or(0, |step| step.start_mono_ns);
    let total = (last.start_mono_ns + last.us * 1000).saturating_sub(begin).max(1);
    let mut text = format!("{} of {}: {}\n", last.operation, last.vm, duration(total / 1000));
    for step in steps {
        let start = (step.start_mono_ns - begin) * WIDTH / total;
        let end = ((step.start_mono_ns - begin + step.us * 1000) * WIDTH)
            .div_ceil(total)
            .clamp(start + 1, WIDTH.max(start + 1));
        let bar = format!("{}{}", " ".repeat(start as usize), "█".repeat((end - start) as usize));
        let bar: String = bar.chars().take(WIDTH as usize + 1).collect();
        text += &format!(
            "{:8} {:24} {bar:width$} {:>9}\n",
            step.phase,
            step.step,
            duration(step.us),
            width = WIDTH as usize + 1
        );
    }
    text
}
