//! Steps after the guest has resumed: setting its clock, which has stood still, and announcing its new location in the
//! network. A failure of these steps does not undo the hand-over.

use rekindle_qemu::agent;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait until QEMU reports that the guest has the agent's port open.
const AGENT_PORT_TIMEOUT: Duration = Duration::from_millis(100);
const AGENT_PORT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long an agent may take to set the guest's clock: the agent's own pages may load on demand.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// What has become of the guest's clock. A clock that is not set continues from the time at which the guest was
/// stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClockOutcome {
    /// Set by the guest's agent.
    Set,
    /// The guest was notified of the time, and sets its clock itself.
    #[serde(rename = "told")]
    SetByGuest,
    NoAgent,
    /// The guest is a domain of libvirt, which has its agent.
    NotSet,
    Failed(String),
}

impl fmt::Display for ClockOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set => write!(f, "its clock is set"),
            Self::SetByGuest => write!(f, "it sets its clock itself"),
            Self::NotSet => {
                write!(f, "its clock continues from the moment of the stop; to set it: virsh domtime DOMAIN --now")
            }
            Self::NoAgent => write!(f, "its clock continues from the moment of the stop, since no agent runs in it"),
            Self::Failed(why) => {
                write!(f, "its clock continues from the moment of the stop, since it cannot be set: {why}")
            }
        }
    }
}

/// Sets the guest's clock through its agent. `has_agent_port`: the hardware has the agent's port.
pub fn set_clock(qmp: &mut Qmp, vmm: &Vmm, has_agent_port: bool) -> ClockOutcome {
    if !has_agent_port {
        return ClockOutcome::NoAgent;
    }
    let result = match wait_for_agent(qmp) {
        Ok(true) => agent::set_time(&vmm.directory().agent(), AGENT_TIMEOUT).map_err(|e| e.to_string()),
        Ok(false) => return ClockOutcome::NoAgent,
        Err(e) => Err(e.to_string()),
    };
    match result {
        Ok(()) => ClockOutcome::Set,
        Err(why) => {
            tracing::warn!("the guest's clock is not set: {why}; set it in the guest, e.g. chronyc makestep");
            ClockOutcome::Failed(why)
        }
    }
}

/// Returns whether an agent has its port open, within [`AGENT_PORT_TIMEOUT`].
fn wait_for_agent(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let deadline = Instant::now() + AGENT_PORT_TIMEOUT;
    while !agent::is_listening(qmp)? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(AGENT_PORT_POLL_INTERVAL);
    }
    Ok(true)
}

/// Makes QEMU announce the guest's network cards, so that switches and neighbors learn the guest's new location.
pub fn announce(qmp: &mut Qmp, name: &str) {
    // Five rounds; the times between them are in ms.
    let schedule = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
    if let Err(e) = qmp.execute::<Value>("announce-self", schedule) {
        tracing::debug!("{name}: its network cards were not announced: {e}");
    }
}
