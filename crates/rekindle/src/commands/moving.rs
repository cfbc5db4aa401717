//! `rekindle move`, and `rekindle receive`, which it starts on the destination host.

use super::dry_run::{self, PlannedAction};
use super::interrupts;
use super::store::credentials;
use crate::cli::{self, Move};
use crate::output::{Output, duration};
use anyhow::{Context, Result};
use rekindle_protect::moving::source::{MoveSettings, check};
use rekindle_protect::moving::target;
use rekindle_protect::moving::{MoveEvent, MoveReport, RemoteHost};
use rekindle_reboot::moving::start;
use rekindle_store::StoreUrl;
use rekindle_vm::host::Host;
use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;

pub fn start_move(output: &Output, arguments: &Move) -> Result<ExitCode> {
    let host = Host::open()?;
    let name = &arguments.name;
    let settings = MoveSettings {
        remote: remote_host(&arguments.remote),
        store: absolute_store(&arguments.store)?,
        create_store: arguments.create_store,
        credentials: credentials(&arguments.credentials),
        definition: arguments.definition.clone(),
        qemu: arguments.qemu.clone(),
        connect: arguments.connect.clone(),
        preview: arguments.preview,
    };
    let interrupted = interrupts()?;
    let mut report = |event: &MoveEvent| {
        let _ = output.result(event, format!("{name}: {event}"));
    };
    if arguments.dry_run {
        let would_move = format!("move its guest to {}", arguments.remote.to);
        let action = check(&host, name, &settings, &mut |_| {}).map(|()| would_move);
        return dry_run::print(output, &[PlannedAction { name: name.to_string(), action }]);
    }
    let moved = start(&host, name, &settings, &interrupted, &mut report)?;
    output.result(&moved, describe(&moved))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn remote_host(arguments: &cli::RemoteHost) -> RemoteHost {
    let cli::RemoteHost { to, ssh, rekindle } = arguments;
    RemoteHost { host: to.clone(), ssh: ssh.clone(), rekindle: rekindle.clone() }
}

pub(super) fn describe(moved: &MoveReport) -> String {
    let destination = moved.destination.as_ref().map_or_else(String::new, |destination| {
        let prepared = if destination.prepared { ", prepared before" } else { "" };
        format!(" (QEMU process {}{prepared}); {}", destination.pid, destination.clock)
    });
    format!(
        "{} runs on {} after {}, stopped for {}{destination}; its memory is loaded on demand",
        moved.name,
        moved.host,
        duration(moved.resumed_after_us),
        duration(moved.stopped_us)
    )
}

/// Makes a store's path absolute, so that it names the same directory on the destination host.
fn absolute_store(store: &StoreUrl) -> Result<StoreUrl> {
    Ok(match store {
        StoreUrl::Directory(path) => {
            StoreUrl::Directory(std::path::absolute(path).with_context(|| path.display().to_string())?)
        }
        StoreUrl::Objects(_) => store.clone(),
    })
}

pub fn receive() -> Result<ExitCode> {
    let host = Host::open()?;
    let start_helpers = |name: &str| super::helpers::start_helpers(&host, name);
    // Use the descriptors unbuffered: a wait for input polls the descriptor, and must not miss bytes in a buffer.
    let requests = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let answers = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    target::receive(&host, requests, answers, &start_helpers)?;
    Ok(ExitCode::SUCCESS)
}
