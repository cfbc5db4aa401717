//! The daemon as a service of systemd. A client that connects to one of the service's sockets starts it again (*socket
//! activation*). So whatever triggers the service is stopped with it, and started with it.

use super::DaemonError;
use rekindle_kernel::process::Process;
use rekindle_kernel::systemd::{is_running, properties, systemctl};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Properties with the units that a stop of the service would stop, too.
const STOPPED_WITH_IT: [&str; 4] = ["RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf"];

/// The service that runs the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    pub service: String,
    /// Active units that start the service: its sockets.
    pub triggers: Vec<String>,
}

impl Unit {
    /// Returns the service whose main process is the daemon; `None` if systemd does not run it.
    pub(super) fn of(daemon: Process, programs: &[&str]) -> Result<Option<Self>, DaemonError> {
        if !is_running() {
            return Ok(None);
        }
        for program in programs {
            let service = format!("{program}.service");
            let query = format!("--property=MainPID,TriggeredBy,{}", STOPPED_WITH_IT.join(","));
            let properties = properties(&show(&[&query, &service])?);
            if properties.get("MainPID").map(String::as_str) == Some(daemon.pid.to_string().as_str()) {
                return Self::with_active_triggers(service, &properties).map(Some);
            }
        }
        Ok(None)
    }

    fn with_active_triggers(service: String, properties: &BTreeMap<String, String>) -> Result<Self, DaemonError> {
        let units = |property: &str| {
            let names = properties.get(property).map(String::as_str).unwrap_or_default();
            names.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>()
        };
        let triggers = active(&units("TriggeredBy"))?;
        let stopped_with_it: BTreeSet<_> = STOPPED_WITH_IT.iter().flat_map(|property| units(property)).collect();
        let stopped_with_it = active(&stopped_with_it)?;
        let others: Vec<_> = stopped_with_it.difference(&triggers).cloned().collect();
        if !others.is_empty() {
            return Err(DaemonError::OthersDepend { service, units: others.join(" ") });
        }
        Ok(Self { service, triggers: triggers.into_iter().collect() })
    }

    /// Stops the service and what triggers it. Returns when its main process has ended.
    pub(super) fn stop(&self) -> Result<(), DaemonError> {
        // In one call: systemd ignores connections to a socket that is about to be stopped.
        let units = std::iter::once(&self.service).chain(&self.triggers);
        let arguments: Vec<&str> = std::iter::once("stop").chain(units.map(String::as_str)).collect();
        let failed = |source| DaemonError::NotStopped { command: command_line(&arguments), source };
        systemctl(&arguments).map(drop).map_err(failed)
    }

    /// Starts the service and what triggers it.
    pub(super) fn start(&self) -> Result<(), DaemonError> {
        // Sockets first: systemd does not start the socket of a service that runs already.
        let units = self.triggers.iter().chain(std::iter::once(&self.service));
        let arguments: Vec<&str> = std::iter::once("start").chain(units.map(String::as_str)).collect();
        let failed = |source| DaemonError::NotStarted { command: command_line(&arguments), source };
        systemctl(&arguments).map(drop).map_err(failed)
    }
}

/// Returns those of `units` that are active, or about to be.
fn active(units: &BTreeSet<String>) -> Result<BTreeSet<String>, DaemonError> {
    if units.is_empty() {
        return Ok(BTreeSet::new());
    }
    let mut arguments = vec!["--property=Id,ActiveState"];
    arguments.extend(units.iter().map(String::as_str));
    let blocks = show(&arguments)?;
    let is_active = |unit: &BTreeMap<String, String>| {
        !matches!(unit.get("ActiveState").map(String::as_str), Some("inactive" | "failed"))
    };
    let units = blocks.split("\n\n").map(properties).filter(is_active);
    Ok(units.filter_map(|mut unit| unit.remove("Id")).collect())
}

fn show(arguments: &[&str]) -> Result<String, DaemonError> {
    let arguments: Vec<&str> = std::iter::once("show").chain(arguments.iter().copied()).collect();
    systemctl(&arguments).map_err(|source| DaemonError::Systemctl { command: command_line(&arguments), source })
}

fn command_line(arguments: &[&str]) -> String {
    format!("systemctl {}", arguments.join(" "))
}
