//! `rekindle attach` and `rekindle detach`: adopt a QEMU that Rekindle did not start, and release it.

use super::show::{description, version_text};
use crate::cli::{Attach, NameOnly};
use crate::output::Output;
use anyhow::Result;
use rekindle_life::attach::{self as adoption, AttachError, Detached};
use rekindle_protect::pager::wait_filled;
use rekindle_qemu::adopt::AdoptError;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::qmp::QmpError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::process::ExitCode;
use std::time::Duration;

/// How long `detach` waits for a pager that loads the guest's memory.
const FILL_TIMEOUT: Duration = Duration::from_secs(300);

pub fn attach(output: &Output, arguments: Attach) -> Result<ExitCode> {
    let Attach { name, qmp, libvirt, connect } = arguments;
    super::reject_reserved_name(&name)?;
    let host = Host::open()?;
    let monitor = match (libvirt, qmp) {
        (Some(domain), _) => Monitor::Libvirt { domain, connect },
        (None, path) => Monitor::Socket { path: path.unwrap_or_default() },
    };
    let state = adoption::attach(&host, &name, monitor).map_err(explain)?;
    let version = version_text(&state);
    let pid = state.vmm.as_ref().map(|vmm| vmm.pid).unwrap_or_default();
    let starter = state.attached.as_ref().map(|attached| attached.starter.clone()).unwrap_or_default();
    let text = format!(
        "{name} is QEMU {version} (process {pid}), started {starter}; protect it: \
         rekindle protect {name} --store DIR --create-store"
    );
    output.result(&description(&host, &state)?, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds to an error of the connection how a QEMU gets a socket to connect to.
fn explain(error: AttachError) -> anyhow::Error {
    match &error {
        AttachError::Adopt(AdoptError::Qmp(QmpError::Connect { path, .. })) => {
            let text = format!(
                "no QEMU can be reached at {0}; write the path that QEMU was started with: -qmp unix:{0},server=on,wait=off",
                path.display()
            );
            anyhow::Error::from(error).context(text)
        }
        _ => error.into(),
    }
}

pub fn detach(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = &arguments.name;
    let host = Host::open()?;
    wait_filled(&RunDir::new(&host.root, name.as_str()), FILL_TIMEOUT)?;
    let detached = adoption::detach(&host, name.as_str())?;
    let (running, text) = match detached {
        Detached::Running => (true, "released; its guest continues to run"),
        Detached::Ended => (false, "released; its QEMU had ended"),
    };
    output.result(&serde_json::json!({"name": name, "running": running}), format!("{name}: {text}"))?;
    Ok(ExitCode::SUCCESS)
}
