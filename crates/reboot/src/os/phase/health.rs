//! A phase that no guest announces: it has come to it when its service answers for the first time or, if it has none to ask, its agent.
//!
//! The guest is not told and does not wait, so it is stopped in the middle of whatever it does then. That is no different for the rule:
//! what it has touched of its disks the ledger knows at every moment.

use rekindle_probe::{Target, UrlError, check};
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::definition::{Definition, NetBackend, TapPlace};
use std::time::Duration;

/// How long a guest may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// How it is asked.
#[derive(Debug)]
enum Ask {
    Service {
        target: Target,
        /// The network namespace in which the guest's tap is.
        netns: Option<String>,
    },
    Agent,
}

/// The phase in which a guest is healthy.
#[derive(Debug)]
pub(super) struct Health {
    /// Its name.
    pub(super) phase: String,
    ask: Ask,
}

impl Health {
    /// What a definition says of it; none if there is no such phase.
    pub(super) fn of(definition: &Definition) -> Result<Option<Self>, UrlError> {
        let Some(phase) = definition.phase.healthy.clone() else { return Ok(None) };
        let ask = match &definition.probe {
            None => Ask::Agent,
            Some(probe) => {
                let place = definition.nets.iter().find_map(|net| match &net.backend {
                    NetBackend::Tap { place: TapPlace::Netns { netns, .. }, .. } => Some(netns.clone()),
                    NetBackend::Tap { .. } | NetBackend::User { .. } => None,
                });
                Ask::Service { target: probe.to_string().parse()?, netns: place }
            }
        };
        Ok(Some(Self { phase, ask }))
    }

    /// Whether the guest of `vmm` is healthy now.
    pub(super) fn is_well(&self, vmm: &Vmm) -> bool {
        match &self.ask {
            Ask::Service { target, netns } => check(target, PATIENCE, netns.as_deref()).is_ok(),
            Ask::Agent => vmm.watch(PATIENCE).and_then(|mut qmp| agent::listens(&mut qmp)).unwrap_or(false),
        }
    }
}
