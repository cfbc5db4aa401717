//! `rekindle show`, and `rekindle ls` of previous releases: the VMs of this host, one VM with all defaults, and a timeline of its last
//! operation.

use super::existing_run_dir;
use crate::cli::Show;
use crate::output::{self, Output, duration};
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use rekindle_qemu::command::Start;
use rekindle_qemu::vmm::Vmm;
use rekindle_reboot::os::phase::{Candidate, candidates};
use rekindle_store::types::utc;
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
    let mut vms = Vec::new();
    for name in RunDir::list(&host.root)? {
        let rundir = RunDir::new(&host.root, &name);
        let read = State::read(&rundir).and_then(|state| Ok((state, status::status(&rundir)?)));
        let (state, status) = match read {
            Ok((Some(state), status)) => (state, status),
            // The VM is just being created or removed.
            Ok((None, _)) => continue,
            Err(e) => {
                vms.push(json!({"name": name, "error": e.to_string()}));
                table.add_row([name, e.to_string()]);
                continue;
            }
        };
        let version = version_text(&state);
        let pid = current_qemu(&state).map(|vmm| vmm.pid);
        table.add_row([
            name.clone(),
            status.to_string(),
            version.clone(),
            pid.map(|pid| pid.to_string()).unwrap_or_default(),
            state.definition.memory.to_string(),
            state.hardware.machine.clone(),
            state.attached.as_ref().map_or("rekindle".to_owned(), |attached| format!("attached, {}", attached.starter)),
        ]);
        vms.push(json!({"name": name, "status": status, "qemu_version": version, "pid": pid,
            "memory": state.definition.memory, "machine": state.hardware.machine, "attached": state.attached}));
    }
    let text = if vms.is_empty() { "no VMs; start one: rekindle run FILE".to_owned() } else { table.trim_fmt() };
    output.result(&vms, text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn show(output: &Output, arguments: &Show) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = arguments.name.as_str();
    if arguments.timeline {
        let entries = timeline::read(&existing_run_dir(&host, name)?)?;
        output.result(&entries, draw_timeline(&entries))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rundir = RunDir::new(&host.root, name);
    let state = State::read(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
    let definition = state.definition.to_toml().context("the definition cannot be written as TOML")?;
    let mut text = format!("# {name} is {}\n", status::status(&rundir)?);
    text += &describe_state(&rundir, &state);
    for helper in helpers::list(&rundir)? {
        text += &helper_line(&helper);
    }
    for candidate in candidates::list(&host, &rundir, &state) {
        text += &candidate_line(&candidate);
    }
    text += &format!("\n{definition}");
    output.result(&description(&host, &state)?, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the lines about a VM's QEMU and hardware.
fn describe_state(rundir: &RunDir, state: &State) -> String {
    let mut text = String::new();
    if let Some(attached) = &state.attached {
        text += &format!("# attached to a QEMU that was started {}\n", attached.starter);
        text += "# the definition below is incomplete; a checkpoint has its whole command line\n";
    }
    if let Some(vmm) = current_qemu(state) {
        let user = vmm.owner().map_or_else(|_| String::new(), |owner| format!(", user {}", owner.user.as_raw()));
        text += &format!("# QEMU {}: {} (process {}{user})\n", version_text(state), vmm.binary.display(), vmm.pid);
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
    text
}

/// Returns the version of the VM's QEMU; empty if it is not known.
pub fn version_text(state: &State) -> String {
    state.version.as_ref().map(ToString::to_string).unwrap_or_default()
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
fn candidate_line(candidate: &Candidate) -> String {
    let Candidate { name, taken_us, bytes, unusable_because } = candidate;
    let Some(taken_us) = taken_us else {
        return format!("# phase {name}: {}\n", unusable_because.as_deref().unwrap_or_default());
    };
    let size = output::bytes(*bytes);
    let age = match timeline::host_us().checked_sub(*taken_us) {
        Some(age_us) => format!("{} old", duration(age_us)),
        None => format!("taken at {}, after the time of this host's clock", utc(*taken_us)),
    };
    let usability = unusable_because.as_ref().map_or("may be used".to_owned(), |why| format!("may not be used: {why}"));
    format!("# phase {name}: {size}, {age}; {usability}\n")
}

/// Returns the QEMU that runs the guest, or is prepared for it.
fn current_qemu(state: &State) -> Option<&Vmm> {
    state.vmm.as_ref().or(state.prepared.as_ref().map(|prepared| &prepared.vmm))
}

/// Returns the JSON description of a VM.
pub fn description(host: &Host, state: &State) -> Result<Value> {
    let rundir = RunDir::new(&host.root, &state.hardware.name);
    let directory = rundir.vmm(state.generation);
    // If the binary no longer exists, the syntax of its options does not matter: no QEMU can be started from it.
    let binary = current_qemu(state).map_or(&state.definition.qemu, |vmm| &vmm.binary);
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
        "running_command_line": current_qemu(state).and_then(|vmm| command_line(vmm.pid)),
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
const BAR_WIDTH: u64 = 48;
/// A longer time between two steps separates operations.
const MAX_GAP_NS: u64 = 1_000_000_000;

/// Draws the last operation's steps as bars over time.
fn draw_timeline(entries: &[Entry]) -> String {
    let steps = last_operation(entries);
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        return "no operation has been done on this VM yet".into();
    };
    let begin_ns = first.start_mono_ns;
    let total_ns = end_ns(last).saturating_sub(begin_ns).max(1);
    let mut text = format!("{} of {}: {}\n", last.operation, last.vm, duration(total_ns / 1000));
    for step in steps {
        let start = (step.start_mono_ns - begin_ns) * BAR_WIDTH / total_ns;
        // Each step is at least one character long, also the last one.
        let end = ((end_ns(step) - begin_ns) * BAR_WIDTH).div_ceil(total_ns);
        let end = end.clamp(start + 1, BAR_WIDTH.max(start + 1));
        let bar = format!("{}{}", " ".repeat(start as usize), "█".repeat((end - start) as usize));
        let width = BAR_WIDTH as usize + 1;
        let bar: String = bar.chars().take(width).collect();
        text += &format!("{:8} {:24} {bar:width$} {:>9}\n", step.phase, step.step, duration(step.us));
    }
    text
}

/// Returns the steps of the last operation: they follow one another without a gap.
fn last_operation(entries: &[Entry]) -> &[Entry] {
    let is_boundary = |pair: &[Entry]| match pair {
        [before, after] => {
            before.operation != after.operation
                || before.phase > after.phase
                || after.start_mono_ns.saturating_sub(end_ns(before)) > MAX_GAP_NS
        }
        _ => false,
    };
    let last_boundary = entries.windows(2).rposition(is_boundary);
    last_boundary.and_then(|index| entries.get(index + 1..)).unwrap_or(entries)
}

fn end_ns(step: &Entry) -> u64 {
    step.start_mono_ns + step.us * 1000
}
