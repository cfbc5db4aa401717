//! The command line of a machine that another program has designed: its own arguments, and Rekindle's for everything
//! around the machine (sockets, monitors, RAM files, networks).

use super::argument_list::{ArgumentList, escaped, escaped_path};
use super::{Directory, ForeignMachine, Hardware, NetBackend, Start};
use crate::options::Options;
use crate::syntax::Syntax;
use serde_json::{Value, json};
use std::path::Path;
use uuid::Uuid;

/// Returns the arguments for `machine`. Of `hardware`, only the name, the accelerator, the RAM file, the networks and
/// the VM generation ID are used.
pub(super) fn arguments(
    machine: &ForeignMachine,
    hardware: &Hardware,
    directory: &Directory,
    console_log: &Path,
    start: Start,
    syntax: Syntax,
) -> Vec<String> {
    let mut list = ArgumentList::default();
    list.process(&hardware.name, syntax);
    list.sandbox(syntax);
    list.option("-monitor", "none");
    list.option("-pidfile", directory.pid().to_string_lossy());
    list.option("-global", "migration.send-configuration=off");
    list.accelerator(&hardware.accel);
    for (backend, (file, bytes)) in machine.backends.iter().zip(machine.ram_files(&hardware.ram.path)) {
        let (id, file) = (escaped(&backend.id), escaped_path(&file));
        let options = format!("id={id},size={bytes},mem-path={file},share=on,prealloc=off");
        list.option("-object", format!("memory-backend-file,{options}"));
    }
    add_sockets(&mut list, machine, directory, console_log, syntax);
    add_networks(&mut list, machine, hardware);
    add_machine(&mut list, machine, hardware.vm_generation);
    list.finish(start)
}

fn add_sockets(
    list: &mut ArgumentList,
    machine: &ForeignMachine,
    directory: &Directory,
    console_log: &Path,
    syntax: Syntax,
) {
    // The ids of Rekindle's own monitors must not be among those of the machine.
    list.monitor("rekindle-qmp", &directory.qmp(), syntax);
    list.monitor("rekindle-watch", &directory.watch(), syntax);
    list.monitor("rekindle-protect", &directory.protect(), syntax);
    list.monitor("rekindle-save", &directory.save(), syntax);
    if let Some(id) = &machine.console {
        list.logged_socket(id, &directory.console(), console_log);
    }
    if let Some(id) = &machine.agent {
        list.socket(id, &directory.agent());
    }
}

fn add_networks(list: &mut ArgumentList, machine: &ForeignMachine, hardware: &Hardware) {
    for (index, (net, network)) in hardware.nets.iter().zip(&machine.networks).enumerate() {
        let id = escaped(&net.id);
        let backend = match &net.backend {
            NetBackend::Tap(tap) => tap.netdev(index, &id),
            NetBackend::User(rules) => {
                let options = network.options.clone().unwrap_or_else(|| format!("user,id={id}"));
                with_forwards(options, rules)
            }
        };
        list.option("-netdev", backend);
    }
}

/// Adds forwarded ports to the options of a user network, as JSON if the options are JSON.
fn with_forwards(network: String, rules: &[String]) -> String {
    match Options::parse(&network, "type") {
        Ok(Options::Json(mut map)) if !rules.is_empty() => {
            let rules: Vec<_> = rules.iter().map(|rule| json!({ "str": rule })).collect();
            map.insert("hostfwd".into(), rules.into());
            Value::Object(map).to_string()
        }
        _ => rules.iter().fold(network, |network, rule| network + ",hostfwd=" + &escaped(rule)),
    }
}

/// Adds the arguments of the machine itself. A device for the VM generation ID gets the VM's current one.
fn add_machine(list: &mut ArgumentList, machine: &ForeignMachine, generation: Option<Uuid>) {
    let mut is_device = false;
    for argument in machine.arguments_with_overlays() {
        let generation_device = generation.filter(|_| is_device).and_then(|guid| with_generation(&argument, guid));
        is_device = argument == "-device";
        list.extend([generation_device.unwrap_or(argument)]);
    }
}

/// Returns the options of a VM generation ID device with the ID `guid`; `None` for another device.
fn with_generation(device: &str, guid: Uuid) -> Option<String> {
    let mut options = Options::parse(device, "driver").ok()?;
    (options.get("driver")? == "vmgenid").then(|| {
        options.set("guid", &guid.to_string());
        options.to_string()
    })
}
