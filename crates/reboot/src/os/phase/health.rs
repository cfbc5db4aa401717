//! A phase that the guest does not announce. The guest is in this phase when its service answers for the first time;
//! without a service to probe, when its agent does.
//!
//! The guest does not know about the save and does not wait for it, so it is stopped at an arbitrary moment. The rule
//! of use is that of announced phases: the ledger always knows which disk blocks the guest has touched.

use rekindle_probe::{Target, UrlError, check as probe};
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::{Definition, NetBackend, TapPlace};
use std::time::Duration;

/// How long the guest's service or agent may take to answer one probe.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Check by which a guest's health is detected.
#[derive(Debug)]
enum HealthCheck {
    Service {
        target: Target,
        /// Network namespace of the guest's tap.
        netns: Option<String>,
    },
    Agent,
}

/// The phase in which a guest is healthy.
#[derive(Debug)]
pub(super) struct HealthyPhase {
    pub(super) phase: String,
    check: HealthCheck,
}

impl HealthyPhase {
    /// Reads the healthy phase from a definition. `None` if the definition names none.
    pub(super) fn of(definition: &Definition) -> Result<Option<Self>, UrlError> {
        let Some(phase) = definition.phase.healthy.clone() else { return Ok(None) };
        let check = match &definition.probe {
            None => HealthCheck::Agent,
            Some(url) => {
                let netns = definition.nets.iter().find_map(|net| match &net.backend {
                    NetBackend::Tap { place: TapPlace::Netns { netns, .. }, .. } => Some(netns.clone()),
                    NetBackend::Tap { .. } | NetBackend::User { .. } => None,
                });
                HealthCheck::Service { target: url.to_string().parse()?, netns }
            }
        };
        Ok(Some(Self { phase, check }))
    }

    /// Returns whether the guest of `vmm` is healthy now.
    pub(super) fn is_healthy(&self, vmm: &Vmm) -> bool {
        match &self.check {
            HealthCheck::Service { target, netns } => probe(target, ANSWER_TIMEOUT, netns.as_deref()).is_ok(),
            HealthCheck::Agent => {
                vmm.connect_watcher(ANSWER_TIMEOUT).and_then(|mut qmp| agent::is_listening(&mut qmp)).unwrap_or(false)
            }
        }
    }
}
