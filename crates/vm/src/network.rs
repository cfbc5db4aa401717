//! Taps, namespaces, bridges.
//!
//! Single system calls are made directly; for everything else `ip` (iproute2) is run. A namespace that Rekindle made
//! is marked by a file in the root of the run directories, and removed with the last VM that uses it. A namespace
//! that existed before stays.

use crate::definition::{Definition, NetBackend, TapPlace};
use crate::host::Host;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_kernel::mounts::hides_mounts;
use rekindle_kernel::{link, netns, tap, vhost_net};
use rekindle_qemu::command::{Hardware, Tap};
use rekindle_qemu::qmp::Qmp;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType};
use std::fs;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may take to close the taps of a QEMU that has ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
const BRIDGE_POLL_INTERVAL: Duration = Duration::from_millis(20);
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Why a network cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A tap requires root.
    #[error("network {id}: a tap needs root (CAP_NET_ADMIN); run as root, or use `kind = \"user\"`")]
    NeedsRoot {
        /// Id of the network.
        id: String,
    },
    /// The interface is missing or is not a bridge.
    #[error("network {id}: `bridge = \"{bridge}\"`: {}", why_no_bridge(bridge, *exists))]
    NoBridge {
        /// Id of the network.
        id: String,
        /// Name in the definition.
        bridge: String,
        /// Whether an interface of this name exists.
        exists: bool,
    },
    /// The host's kernel cannot serve a card.
    #[error(
        "network {id}: `vhost = true` is not possible on this host; leave `vhost` out, or make the device available"
    )]
    NoVhost {
        /// Id of the network.
        id: String,
        /// The error of opening a device.
        #[source]
        source: io::Error,
    },
    /// The command `ip` failed.
    #[error("`ip {command}` failed: {message}")]
    Ip {
        /// Arguments of `ip`.
        command: String,
        /// Error output of `ip`.
        message: String,
    },
    /// A network namespace would exist in this process's mount namespace only.
    #[error(
        "network namespace {namespace} does not exist, and the host would not see one that this process makes, which has mounts of its \
         own, as in a systemd unit; run on the host: ip netns add {namespace} && ip -n {namespace} link set lo up"
    )]
    HiddenNamespace {
        /// Name of the namespace.
        namespace: String,
    },
    /// A tap cannot be opened, duplicated or removed.
    #[error("cannot open tap {ifname}; if another VM or program uses it, name another `ifname`")]
    Tap {
        /// Name of the interface.
        ifname: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// A tap cannot be connected to its bridge or namespace.
    #[error("cannot connect tap {ifname}; check whether its bridge or namespace still exists: ip link, ip netns")]
    Connect {
        /// Name of the interface.
        ifname: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

fn why_no_bridge(bridge: &str, exists: bool) -> String {
    if exists {
        "that interface is no bridge; name one that is, or leave the interface to the host and put it into a bridge"
            .into()
    } else {
        format!(
            "there is no such interface; make it (ip link add {bridge} type bridge && ip link set {bridge} up), or correct it"
        )
    }
}

/// Runs `ip` and returns its output.
fn ip(arguments: &[&str]) -> Result<String, NetworkError> {
    let command = arguments.join(" ");
    let output = Command::new("ip").args(arguments).output().map_err(|e| {
        let message = format!("{e}; install iproute2 (apt-get install iproute2)");
        NetworkError::Ip { command: command.clone(), message }
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(NetworkError::Ip { command, message: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
}

/// Runs `work` on an interface in the tap's namespace.
fn in_namespace<T: Send + 'static>(
    tap: &Tap,
    ifname: &str,
    work: fn(&str, tap::Features) -> io::Result<T>,
) -> Result<T, NetworkError> {
    let failed = |source: io::Error| NetworkError::Tap { ifname: ifname.to_owned(), source };
    let (name, features) = (ifname.to_owned(), features(tap));
    match &tap.netns {
        Some(namespace) => {
            netns::run_in(namespace, move || work(&name, features)).and_then(|done| done).map_err(failed)
        }
        None => work(ifname, features).map_err(failed),
    }
}

/// Checks that the networks of a definition are possible. Nothing is changed.
///
/// # Errors
/// [`NetworkError::NeedsRoot`], [`NetworkError::NoBridge`], [`NetworkError::NoVhost`]; [`NetworkError::Ip`] when `ip`
/// cannot be run.
pub fn check(definition: &Definition) -> Result<(), NetworkError> {
    for net in &definition.nets {
        let NetBackend::Tap { place, vhost, .. } = &net.backend else { continue };
        if !rustix::process::geteuid().is_root() {
            return Err(NetworkError::NeedsRoot { id: net.id.clone() });
        }
        if *vhost {
            vhost_net::open().map_err(|source| NetworkError::NoVhost { id: net.id.clone(), source })?;
        }
        if let TapPlace::Bridge { bridge } = place {
            let exists = has_interface(bridge);
            // `ip` prints nothing for an interface of another type.
            if exists && !ip(&["-o", "link", "show", "dev", bridge, "type", "bridge"])?.is_empty() {
                continue;
            }
            return Err(NetworkError::NoBridge { id: net.id.clone(), bridge: bridge.clone(), exists });
        }
    }
    Ok(())
}

/// Returns whether this network namespace has an interface of that name.
#[must_use]
pub fn has_interface(name: &str) -> bool {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None);
    socket.is_ok_and(|socket| name_to_index(&socket, name).is_ok())
}

/// Waits until the bridges of a definition exist: after a boot of the host they may appear later than Rekindle
/// starts.
///
/// # Errors
/// [`NetworkError::NoBridge`] after `patience`.
pub fn wait_for_bridges(definition: &Definition, patience: Duration) -> Result<(), NetworkError> {
    let deadline = Instant::now() + patience;
    for net in &definition.nets {
        let NetBackend::Tap { place: TapPlace::Bridge { bridge }, .. } = &net.backend else { continue };
        while !has_interface(bridge) {
            if Instant::now() > deadline {
                return Err(NetworkError::NoBridge { id: net.id.clone(), bridge: bridge.clone(), exists: false });
            }
            thread::sleep(BRIDGE_POLL_INTERVAL);
        }
    }
    Ok(())
}

/// Makes the missing network namespaces of a definition.
///
/// # Errors
/// [`NetworkError::Ip`], [`NetworkError::HiddenNamespace`].
pub fn make_namespaces(host: &Host, definition: &Definition) -> Result<(), NetworkError> {
    for net in &definition.nets {
        if let NetBackend::Tap { place: TapPlace::Netns { netns, .. }, .. } = &net.backend {
            make_namespace(host, netns)?;
        }
    }
    Ok(())
}

/// Makes and connects the taps of a VM whose definition has passed [`check`].
///
/// On success: the taps, at the descriptor numbers of the command line.
///
/// # Errors
/// [`NetworkError`]; taps that were made must be removed with [`remove`].
pub fn create(host: &Host, state: &State) -> Result<Vec<(OwnedFd, RawFd)>, NetworkError> {
    let mut fds = Vec::new();
    for (index, (net, card)) in state.definition.nets.iter().zip(&state.hardware.nets).enumerate() {
        let (NetBackend::Tap { place, .. }, rekindle_qemu::command::NetBackend::Tap(tap)) =
            (&net.backend, &card.backend)
        else {
            continue;
        };
        if let TapPlace::Netns { netns: namespace, .. } = place {
            make_namespace(host, namespace)?;
        }
        fds.extend(open(tap, index)?);
        connect(tap, place)?;
    }
    Ok(fds)
}

/// Connects a tap to its bridge or namespace.
fn connect(tap: &Tap, place: &TapPlace) -> Result<(), NetworkError> {
    let ifname = tap.ifname.as_str();
    let failed = |source: io::Error| NetworkError::Connect { ifname: ifname.to_owned(), source };
    match place {
        TapPlace::Bridge { bridge } => match link::join(ifname, bridge) {
            Ok(()) => link::up(ifname).map_err(failed),
            // The tap is in this bridge already, or must be moved from another one.
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {
                ip(&["link", "set", ifname, "master", bridge, "up"]).map(drop)
            }
            Err(e) => Err(failed(e)),
        },
        TapPlace::Netns { netns, address } => {
            if let Some(address) = address {
                ip(&["-n", netns, "addr", "replace", &address.to_string(), "dev", ifname])?;
            }
            let name = ifname.to_owned();
            netns::run_in(netns, move || link::up(&name)).and_then(|done| done).map_err(failed)
        }
    }
}

/// Opens the taps of a VM whose QEMU has ended.
///
/// # Errors
/// [`NetworkError::Tap`], when a tap is missing or in use.
pub fn reopen(hardware: &Hardware) -> Result<Vec<(OwnedFd, RawFd)>, NetworkError> {
    let mut fds = Vec::new();
    for (index, tap) in hardware.taps() {
        fds.extend(open(tap, index)?);
    }
    Ok(fds)
}

/// Opens all queues of the tap of the `index`-th card, at the descriptor numbers of the command line.
fn open(tap: &Tap, index: usize) -> Result<Vec<(OwnedFd, RawFd)>, NetworkError> {
    wait_until_unused(tap)?;
    let opened: Result<Vec<_>, NetworkError> =
        (0..tap.queues).map(|queue| Ok((on_released(tap, tap::open)?, Tap::fd(index, queue)))).collect();
    let opened = opened?;
    // Another process may have opened it since.
    if tap.queues > 1 && open_queues(tap)? != u64::from(tap.queues) {
        return Err(in_use(tap));
    }
    Ok(opened)
}

fn in_use(tap: &Tap) -> NetworkError {
    NetworkError::Tap { ifname: tap.ifname.clone(), source: io::ErrorKind::ResourceBusy.into() }
}

/// Returns the features of the tap of a guest.
fn features(tap: &Tap) -> tap::Features {
    if tap.queues > 1 { tap::Features::OWN_QUEUES } else { tap::Features::OWN }
}

/// Waits until no process has a queue of the tap open. For a tap with one queue the kernel itself rejects a second open; any
/// number of processes may open one with several.
fn wait_until_unused(tap: &Tap) -> Result<(), NetworkError> {
    if tap.queues == 1 {
        return Ok(());
    }
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    let busy = |e: &NetworkError| is_busy(e) && Instant::now() < deadline;
    repeat_while(busy, || match open_queues(tap)? {
        0 => Ok(()),
        _ => Err(in_use(tap)),
    })
}

/// Returns how many queues of a tap are open. None of a tap that does not exist.
fn open_queues(tap: &Tap) -> Result<u64, NetworkError> {
    let namespace = tap.netns.iter().flat_map(|namespace| ["-n", namespace.as_str()]);
    // Not `show dev`: that fails if there is no such interface.
    let arguments: Vec<_> = namespace.chain(["-d", "-j", "link", "show", "type", "tun"]).collect();
    let links = ip(&arguments)?;
    let no_json = |e: serde_json::Error| NetworkError::Ip { command: arguments.join(" "), message: e.to_string() };
    let links: Vec<serde_json::Value> = serde_json::from_str(&links).map_err(no_json)?;
    let ours = links.iter().find(|link| link["ifname"] == tap.ifname.as_str());
    let Some(ours) = ours else { return Ok(0) };
    let count = |key| ours["linkinfo"]["info_data"][key].as_u64();
    match (count("numqueues"), count("numdisabled")) {
        (Some(attached), Some(detached)) => Ok(attached + detached),
        _ => Err(NetworkError::Ip {
            command: arguments.join(" "),
            message: format!("no queues of {}; an iproute2 that prints them is needed", tap.ifname),
        }),
    }
}

fn is_busy(e: &NetworkError) -> bool {
    matches!(e, NetworkError::Tap { source, .. } if source.kind() == io::ErrorKind::ResourceBusy)
}

/// Works on a tap whose QEMU may have ended a moment ago. If the QEMU used io_uring, as it does since 10.2, the kernel
/// closes the tap in the background after the process has ended, and the tap is busy until then.
fn on_released<T: Send + 'static>(
    tap: &Tap,
    work: fn(&str, tap::Features) -> io::Result<T>,
) -> Result<T, NetworkError> {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    let busy = |e: &NetworkError| is_busy(e) && Instant::now() < deadline;
    repeat_while(busy, || in_namespace(tap, &tap.ifname, work))
}

/// Calls `attempt` until it succeeds, or fails with an error that is not `temporary`.
fn repeat_while<T, E>(temporary: impl Fn(&E) -> bool, mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    loop {
        match attempt() {
            Err(e) if temporary(&e) => thread::sleep(RELEASE_POLL_INTERVAL),
            result => return result,
        }
    }
}

/// Forwards the ports of a destination QEMU after it got the guest: only one QEMU can hold a port. A port that is
/// unavailable only causes a warning.
pub fn forward_ports(qmp: &mut Qmp, hardware: &Hardware) {
    for (id, rule) in hardware.forwards() {
        match qmp.human(&format!("hostfwd_add {id} {rule}")) {
            Ok(answer) if answer.trim().is_empty() => {}
            Ok(answer) => tracing::warn!("port forward {rule} of {}: {}", hardware.name, answer.trim()),
            Err(e) => tracing::warn!("port forward {rule} of {}: {e}", hardware.name),
        }
    }
}

/// Removes the taps of a VM, and namespaces that Rekindle made and no VM uses any more. A missing tap is no error.
///
/// # Errors
/// [`NetworkError::Tap`] when a tap is in use; [`NetworkError::Ip`] when a namespace cannot be removed.
pub fn remove(host: &Host, hardware: &Hardware) -> Result<(), NetworkError> {
    for (_, tap) in hardware.taps() {
        let is_namespace_gone = tap.netns.as_ref().is_some_and(|namespace| !netns::path(namespace).exists());
        if !is_namespace_gone {
            wait_until_unused(tap)?;
            on_released(tap, tap::remove)?;
        }
        if let Some(namespace) = &tap.netns {
            release_namespace(host, namespace, &hardware.name)?;
        }
    }
    Ok(())
}

/// Returns the file that marks a namespace as made by Rekindle.
fn marker(host: &Host, namespace: &str) -> PathBuf {
    host.root.join(".netns").join(namespace)
}

fn make_namespace(host: &Host, namespace: &str) -> Result<(), NetworkError> {
    let failed = |e: io::Error| NetworkError::Ip { command: format!("netns add {namespace}"), message: e.to_string() };
    if netns::path(namespace).exists() {
        return Ok(());
    }
    if hides_mounts(Path::new("/run")).map_err(failed)? {
        return Err(NetworkError::HiddenNamespace { namespace: namespace.to_owned() });
    }
    let marker = marker(host, namespace);
    fs::create_dir_all(marker.parent().unwrap_or(&host.root)).map_err(failed)?;
    fs::write(&marker, "").map_err(failed)?;
    match ip(&["netns", "add", namespace]) {
        // Another VM with the same namespace made it in the meantime.
        Err(_) if netns::path(namespace).exists() => {}
        result => drop(result?),
    }
    ip(&["-n", namespace, "link", "set", "lo", "up"]).map(drop)
}

/// Removes a namespace that Rekindle made, unless a VM other than `vm_name` uses it.
fn release_namespace(host: &Host, namespace: &str, vm_name: &str) -> Result<(), NetworkError> {
    let marker = marker(host, namespace);
    if !marker.exists() {
        return Ok(());
    }
    let names = RunDir::list(&host.root).unwrap_or_default();
    let is_used = names.iter().filter(|name| *name != vm_name).any(|name| {
        State::read(&RunDir::new(&host.root, name))
            .ok()
            .flatten()
            .is_some_and(|state| state.hardware.taps().any(|(_, tap)| tap.netns.as_deref() == Some(namespace)))
    });
    if is_used {
        return Ok(());
    }
    if netns::path(namespace).exists() {
        ip(&["netns", "del", namespace])?;
    }
    let _ = fs::remove_file(marker);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_error_is_waited_for_and_another_is_not() {
        let mut answers = vec![Err("in use"), Ok(()), Err("busy"), Err("busy")];
        let is_busy = |e: &&str| *e == "busy";
        assert_eq!(repeat_while(is_busy, || answers.pop().unwrap()), Ok(()));
        assert_eq!(repeat_while(is_busy, || answers.pop().unwrap()), Err("in use"));
        assert!(answers.is_empty(), "each attempt was made once");
    }
}
