//! Steps after the guest resumes: setting its clock, which has stood still, and announcing its new location in the
//! network.

use rekindle_qemu::agent;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait until QEMU reports that the guest has the agent's port open.
const PORT_TIMEOUT: Duration = Duration::from_millis(100);
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long an agent may take to set the guest's clock: the agent's own pages may load on demand.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// State of the guest's clock. A clock that is not set continues from the time at which the guest was stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Set by the guest's agent.
    Set,
    /// The guest was notified of the time, and sets its clock itself.
    #[serde(rename = "told")]
    SetByGuest,
    NoAgent,
    Failed(String),
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set => write!(f, "its clock is set"),
            Self::SetByGuest => write!(f, "it sets its clock itself"),
            Self::NoAgent => write!(f, "its clock continues from the checkpoint, since no agent runs in it"),
            Self::Failed(why) => write!(f, "its clock continues from the checkpoint, since it cannot be set: {why}"),
        }
    }
}

/// Sets the guest's clock through its agent. `has_port`: the hardware has the agent's port.
pub fn set_clock(qmp: &mut Qmp, vmm: &Vmm, has_port: bool) -> Clock {
    if !has_port {
        return Clock::NoAgent;
    }
    let deadline = Instant::now() + PORT_TIMEOUT;
    let set = loop {
        match agent::listens(qmp) {
            Ok(true) => break agent::set_time(&vmm.directory().agent(), AGENT_TIMEOUT).map_err(|e| e.to_string()),
            Ok(false) if Instant::now() > deadline => return Clock::NoAgent,
            Ok(false) => thread::sleep(PORT_POLL_INTERVAL),
            Err(e) => break Err(e.to_string()),
        }
    };
    match set {
        Ok(()) => Clock::Set,
        Err(why) => {
            tracing::warn!("the guest's clock is not set: {why}; set it in the guest, e.g. chronyc makestep");
            Clock::Failed(why)
        }
    }
}

/// Makes QEMU announce the guest's network cards, so that switches and neighbors learn the guest's new location.
pub fn announce(qmp: &mut Qmp, name: &str) {
    let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
    if let Err(e) = qmp.execute::<Value>("announce-self", rounds) {
        tracing::debug!("{name}: its network cards were not announced: {e}");
    }
}
