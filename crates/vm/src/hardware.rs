//! The hardware of a definition, with everything pinned that a QEMU binary could otherwise choose.

use crate::definition::{self, Accel, Bytes, Definition, Forward, NetBackend, OnCrash, Span, TapPlace};
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::command::{self, AGENT_PORTS, Hardware};
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Returns whether KVM can run stock kernels: the module of the CPU's vendor is loaded and `/dev/kvm` opens.
/// `/dev/kvm` alone proves nothing: there are paravirtual ones that open and cannot run a stock kernel.
#[must_use]
pub fn has_kvm() -> bool {
    let is_module_loaded = ["kvm_intel", "kvm_amd"].iter().any(|name| Path::new("/sys/module").join(name).exists());
    is_module_loaded && OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Returns the module that provides KVM on a processor, given its `/proc/cpuinfo`.
#[must_use]
pub fn kvm_module(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    [("svm", "kvm_amd"), ("vmx", "kvm_intel")].into_iter().find(|(flag, _)| has(flag)).map(|(_, module)| module)
}

/// Returns the accelerator for a definition on this host.
///
/// # Errors
/// A text that states what is missing, when KVM is configured and unavailable.
pub fn accelerator(accel: Accel) -> Result<&'static str, String> {
    match accel {
        Accel::Tcg => Ok("tcg"),
        Accel::Auto => Ok(if has_kvm() { "kvm" } else { "tcg" }),
        Accel::Kvm if has_kvm() => Ok("kvm"),
        Accel::Kvm => Err("`accel = \"kvm\"`, but neither kvm_intel nor kvm_amd is loaded or /dev/kvm cannot be \
                           opened; load the module, add this user to group kvm, or use `accel = \"auto\"`"
            .into()),
    }
}

/// Returns a new VM generation ID: 128 random bits (UAPI.14: not a UUID of version 4).
///
/// # Errors
/// A text, when the kernel returns no random bytes.
pub fn new_generation() -> Result<Uuid, String> {
    let mut bytes = [0; 16];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => Ok(Uuid::from_bytes(bytes)),
        Ok(_) => Err("the kernel gives no random bytes for a VM generation ID; try again".into()),
        Err(e) => Err(format!("the kernel gives no random bytes for a VM generation ID: {e}")),
    }
}

/// Returns the hardware of a definition for `binary`, with its RAM in the file `ram`.
///
/// # Errors
/// A text: the accelerator is unavailable, there are too many devices, or no random bytes.
pub fn pin(definition: &Definition, binary: &Binary, ram: PathBuf) -> Result<Hardware, String> {
    let accel = accelerator(definition.accel)?;
    let hardware = Hardware {
        name: definition.name.to_string(),
        uuid: Some(Uuid::new_v4()),
        machine: binary.pinned_machine(&definition.machine).to_owned(),
        cpu: definition.cpu_model(accel == "kvm").to_owned(),
        accel: accel.to_owned(),
        vcpus: definition.vcpus.into(),
        ram: command::Ram { path: ram, bytes: definition.memory.as_u64(), prealloc: definition.ram.prealloc },
        boot: definition.boot.as_ref().map(|boot| command::Boot {
            kernel: boot.kernel.clone(),
            initrd: boot.initrd.clone(),
            append: boot.append.clone(),
        }),
        disks: definition.disks.iter().map(|disk| pin_disk(disk, definition.name.as_ref())).collect(),
        nets: definition.nets.iter().map(pin_net).collect(),
        vga: definition.devices.vga,
        agent: definition.devices.agent,
        agent_ports: Some(AGENT_PORTS),
        phase: !definition.phase.is_empty(),
        rng: definition.devices.rng,
        vm_generation: definition.devices.vmgenid.then(new_generation).transpose()?,
        panic: definition.on_crash != OnCrash::Leave,
        extra: definition.qemu_args.clone(),
        foreign: None,
    };
    hardware.check_slots()?;
    Ok(hardware)
}

fn pin_disk(disk: &definition::Disk, vm_name: &str) -> command::Disk {
    command::Disk {
        id: disk.id.clone(),
        path: disk.path.clone(),
        format: disk.format.as_str().to_owned(),
        readonly: disk.readonly,
        cache: disk.cache.as_str().to_owned(),
        serial: disk.serial.clone(),
        server: disk.server,
        redo: disk.redo.as_ref().map(|folder| redo_folder(folder, vm_name, &disk.id)),
        attic_keep_ms: disk.attic_keep.map(Span::as_millis),
        bps: disk.bps.map(Bytes::as_u64),
        iops: disk.iops,
    }
}

fn pin_net(net: &definition::Net) -> command::Net {
    let backend = match &net.backend {
        NetBackend::User { forward } => command::NetBackend::User(forward.iter().map(Forward::hostfwd).collect()),
        NetBackend::Tap { ifname, queues, vhost, place } => {
            let netns = match place {
                TapPlace::Netns { netns, .. } => Some(netns.clone()),
                TapPlace::Bridge { .. } => None,
            };
            let (ifname, queues, vhost) = (ifname.clone(), *queues, *vhost);
            command::NetBackend::Tap(command::Tap { ifname, netns, queues, vhost })
        }
    };
    command::Net { id: net.id.clone(), mac: net.mac.to_string(), backend }
}

/// Lists the parts of `hardware` that the QEMU `binary` does not support.
#[must_use]
pub fn missing(hardware: &Hardware, binary: &Binary) -> Vec<String> {
    let mut missing = Vec::new();
    let qemu = || format!("{} (QEMU {})", binary.path.display(), binary.version);
    if !binary.machines.contains(&hardware.machine) {
        missing.push(format!("{} does not know the machine type {}", qemu(), hardware.machine));
    }
    let model = hardware.cpu.split(',').next().unwrap_or_default();
    if !binary.cpus.contains(model) && !["host", ""].contains(&model) {
        missing.push(format!("{} does not know the CPU model {model}", qemu()));
    }
    for device in hardware.device_types() {
        // QEMU's own short forms, e.g. `virtio-net`, are aliases of the PCI devices and not listed as types.
        let known = binary.devices.contains(&device) || binary.devices.contains(&format!("{device}-pci"));
        if !known {
            missing.push(format!("{} has no device {device}", qemu()));
        }
    }
    missing
}

/// Returns `binary`. If its cached answers do not support `hardware`, the QEMU is queried again first.
///
/// # Errors
/// [`BinaryError`], when the QEMU cannot be queried.
pub fn binary_for(hardware: &Hardware, binary: Binary, cache: &Path) -> Result<Binary, BinaryError> {
    if missing(hardware, &binary).is_empty() { Ok(binary) } else { binary.probe_again(cache) }
}

/// Returns the redo log directory of a disk, in a folder that VMs may share.
///
/// A VM's name may have dots and dashes, but a disk's id only dashes. Therefore a dot between them distinguishes VM
/// `a` with disk `b-c` from VM `a-b` with disk `c`. Earlier versions put a dash between them; such a log is used
/// where it is.
fn redo_folder(folder: &Path, name: &str, id: &str) -> PathBuf {
    let old_path = folder.join(format!("{name}-{id}.redo"));
    let path = folder.join(format!("{name}.{id}.redo"));
    if old_path.exists() && !path.exists() { old_path } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_of_kvm_is_that_of_the_processor() {
        for (flags, module) in
            [("fpu svm sse", Some("kvm_amd")), ("fpu vmx", Some("kvm_intel")), ("fpu svm_lock", None), ("", None)]
        {
            assert_eq!(kvm_module(&format!("processor\t: 0\nflags\t\t: {flags}\nbugs\t: vmx\n")), module, "{flags}");
        }
        assert_eq!(kvm_module("processor\t: 0\n"), None);
    }

    #[test]
    fn no_two_disks_have_one_redo_log() {
        let folder = tempfile::tempdir().unwrap();
        let mut owners = std::collections::BTreeMap::new();
        for name in ["a", "a-b", "a.b", "a-b.c", "a.b-c", "redo", "a.redo"] {
            for id in ["b", "c", "b-c", "redo", "b_c"] {
                let path = redo_folder(folder.path(), name, id);
                let same_path = owners.insert(path, (name, id));
                assert_eq!(same_path, None, "and {name} {id}");
            }
        }
        std::fs::create_dir(folder.path().join("web-disk0.redo")).unwrap();
        assert!(redo_folder(folder.path(), "web", "disk0").ends_with("web-disk0.redo"), "one that was left is used");
    }
}
