//! `rekindle doctor NAME`: what each technique would do to a guest, or why it is not possible. Nothing is changed.

use super::protect::{describe_estimate, measured_estimate};
use super::reboot_os::describe_os_method;
use super::reboot_vmm::plan_replacement;
use crate::output::{Output, chain};
use anyhow::Result;
use rekindle_life::shutdown::EndMethod;
use rekindle_protect::estimate::Wanted;
use rekindle_protect::protector::DiskPolicy;
use rekindle_reboot::libvirt;
use rekindle_reboot::os::{self, KexecRequest, OsRebootMethod, OsRebootRequest};
use rekindle_vm::doctor::{Finding, Level};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::error::Error;
use std::time::Duration;

/// The default interval of checkpoints.
const EVERY: Duration = Duration::from_secs(2);
const OS_METHODS: [(&str, OsRebootMethod); 4] = [
    ("reboot cold", OsRebootMethod::Cold),
    ("reboot warm-cache", OsRebootMethod::WarmCache),
    ("reboot kexec", OsRebootMethod::Kexec),
    ("reboot phase", OsRebootMethod::Phase),
];

/// Returns a finding for each technique.
///
/// # Errors
/// There is no such VM or domain.
pub fn guest_findings(output: &Output, host: &Host, name: &str) -> Result<Vec<Finding>> {
    let state = State::read(&RunDir::new(&host.root, name))?;
    if state.is_none() && !libvirt::is_domain(name) {
        return Err(LifeError::Unknown { name: name.into() }.into());
    }
    let replacement = plan_replacement(host, name)?.action.map(|action| format!("would {action}"));
    let mut findings = vec![finding("replace-qemu", replacement)];
    let Some(state) = state else {
        findings.push(Finding {
            check: "protect".into(),
            level: Level::Limited,
            observation: "a domain of libvirt that is not attached".into(),
            hint: format!("rekindle attach {name} --libvirt {name}"),
        });
        return Ok(findings);
    };
    if state.attached.is_none() {
        findings.extend(OS_METHODS.map(|(check, how)| finding(check, check_reboot(host, name, how))));
    }
    let wanted = Wanted { policy: None, disks: DiskPolicy::Refuse, output_commit: false, every: EVERY };
    let estimate = measured_estimate(output, host, name, &wanted);
    findings.push(finding("protect", estimate.map(|estimate| describe_estimate(&estimate))));
    Ok(findings)
}

fn check_reboot(host: &Host, name: &str, how: OsRebootMethod) -> Result<String, impl Error + 'static> {
    let request = OsRebootRequest { how, kexec: KexecRequest::default(), candidate: None, end: EndMethod::Shutdown };
    let checked = os::check(host, name, &request).map_err(|failure| *failure.error);
    checked.map(|()| format!("would {}", describe_os_method(how)))
}

/// Returns the finding for a technique that is possible, or not. The errors contain the remedy.
fn finding<E: Error + 'static>(check: &str, result: Result<String, E>) -> Finding {
    let (level, observation) = match result {
        Ok(action) => (Level::Good, action),
        Err(error) => (Level::Limited, format!("not possible: {}", chain(&error))),
    };
    Finding { check: check.into(), level, observation, hint: String::new() }
}
