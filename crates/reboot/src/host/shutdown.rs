//! Starts the shutdown of `rekindle reboot-host`: the next kernel is loaded, the plan is written, and systemd gets the
//! request. Everything can be undone until systemd has received the request.

use super::command::run;
use super::plan::{HostRebootPlan, remove_plan};
use super::{HostError, setup};
use rekindle_kernel::kexec;
use rekindle_vm::disks;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;

/// Loads the kernel, writes the plan, and makes systemd shut the host down.
///
/// *On success:* the shutdown has started. *On failure:* all guests run as before.
pub fn shut_down_host(host: &Host, plan: &HostRebootPlan) -> Result<(), HostError> {
    setup::check_units()?;
    let started = start_shutdown(host, plan);
    if started.is_err() {
        remove_plan(host);
        if plan.kernel.is_some() {
            let _ = kexec::unload();
        }
    }
    started
}

fn start_shutdown(host: &Host, plan: &HostRebootPlan) -> Result<(), HostError> {
    if let Some(kernel) = &plan.kernel {
        kernel.load(&plan.token)?;
    }
    plan.write(host)?;
    let processes = processes_to_keep(host, plan)?;
    if !processes.is_empty() {
        keep_over_shutdown(&processes, &plan.token)?;
    }
    run("systemctl", &["--no-block", if plan.kernel.is_some() { "kexec" } else { "reboot" }])
}

/// Returns the PIDs of the QEMUs and disk servers, with their brokers, of the plan's VMs.
fn processes_to_keep(host: &Host, plan: &HostRebootPlan) -> Result<Vec<u32>, HostError> {
    let mut pids = Vec::new();
    for vm in &plan.vms {
        let rundir = RunDir::new(&host.root, &vm.name);
        let failed = HostError::file(rundir.path());
        let Some(state) = State::read(&rundir).map_err(&failed)? else { continue };
        pids.extend(state.vmm.as_ref().filter(|vmm| vmm.is_alive()).map(|vmm| vmm.pid));
        for disk in disks::served(&state.hardware) {
            let servers = disks::servers(&rundir, &disk.id).map_err(&failed)?;
            for server in servers {
                pids.push(server.pid);
                // Its broker, without which it ends.
                pids.extend(server.others_in_session().map_err(&failed)?.iter().map(|process| process.pid));
            }
        }
    }
    Ok(pids)
}

/// Moves processes to a systemd scope of their own, which systemd leaves alone until the end of the shutdown. Otherwise
/// systemd would end the guests with the session that started them, before it stops the services.
fn keep_over_shutdown(pids: &[u32], token: &str) -> Result<(), HostError> {
    let scope = format!("rekindle-guests-{}.scope", token.get(..8).unwrap_or(token));
    let count = pids.len().to_string();
    let pids: Vec<_> = pids.iter().map(ToString::to_string).collect();
    let mut arguments = vec!["call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"];
    arguments.extend(["org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"]);
    // Two properties: the scope has no default dependencies, and these are its processes.
    arguments.extend([&*scope, "fail", "2", "DefaultDependencies", "b", "false", "PIDs", "au", &*count]);
    arguments.extend(pids.iter().map(String::as_str));
    // No auxiliary units.
    arguments.push("0");
    run("busctl", &arguments)
}
