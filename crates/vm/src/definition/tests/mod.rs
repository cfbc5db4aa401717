//! Whole definitions: the result of a file, the message for each mistake, and reading back what was written.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// Makes a folder with every file that a definition may name.
fn make_folder() -> TempDir {
    let dir = TempDir::new().unwrap();
    for file in ["bzImage", "initrd.img", "disk.img", "data.img", "debian.raw"] {
        fs::write(dir.path().join(file), "x").unwrap();
    }
    fs::write(dir.path().join("root.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    fs::write(dir.path().join("hidden.img"), b"QFI\xfb\0\0\0\x03").unwrap();
    fs::write(dir.path().join("fake.qcow2"), "x").unwrap();
    fs::write(dir.path().join("empty.img"), "").unwrap();
    std::os::unix::fs::symlink("disk.img", dir.path().join("link.img")).unwrap();
    fs::create_dir(dir.path().join("ram")).unwrap();
    dir
}

fn parse(dir: &TempDir, text: &str) -> Definition {
    Definition::parse(text, dir.path(), "web.toml").unwrap_or_else(|errors| panic!("{errors}"))
}

/// Returns every message, with the folder's path replaced by `DIR`.
fn errors_in(dir: &TempDir, text: &str) -> Vec<String> {
    let errors = Definition::parse(text, dir.path(), "web.toml").unwrap_err();
    let folder = dir.path().display().to_string();
    errors.to_string().lines().map(|line| line.replace(&folder, "DIR")).collect()
}

/// Returns the messages for a definition that is valid except for `text`.
fn errors(text: &str) -> Vec<String> {
    let has_boot = ["[boot]", "[[disk]]", "[disk]", "disk ="].iter().any(|part| text.contains(part));
    let boot = if has_boot { "" } else { "\n[boot]\nkernel = \"bzImage\"" };
    errors_in(&make_folder(), &format!("name = \"web\"\n{text}{boot}"))
}

#[test]
fn the_least_definition_gets_every_default() {
    let dir = make_folder();
    let vm = parse(&dir, "name = \"web\"\n[boot]\nkernel = \"bzImage\"\n");
    let expected = Definition {
        name: "web".parse().unwrap(),
        memory: Bytes::from_mib(512),
        vcpus: 1,
        accel: Accel::Auto,
        machine: "q35".into(),
        cpu: "auto".into(),
        qemu: PathBuf::from("qemu-system-x86_64"),
        probe: None,
        shutdown_timeout: Span::from_secs(60),
        on_reboot: OnReboot::Reset,
        on_crash: OnCrash::Leave,
        save_dir: None,
        qemu_args: vec![],
        ram: Ram { dir: None, prealloc: false },
        boot: Some(Boot { kernel: dir.path().join("bzImage"), initrd: None, append: String::new() }),
        devices: Devices { vga: false, agent: true, rng: true, vmgenid: true },
        phase: Phase::default(),
        disks: vec![],
        nets: vec![],
    };
    assert_eq!(vm, expected);
    assert_eq!((vm.cpu_model(true), vm.cpu_model(false)), ("host", "qemu64"));
    let toml = vm.to_toml().unwrap().replace(&dir.path().display().to_string(), "DIR");
    assert_eq!(
        toml,
        r#"name = "web"
memory = "512M"
vcpus = 1
accel = "auto"
machine = "q35"
cpu = "auto"
qemu = "qemu-system-x86_64"
shutdown_timeout = "1m"
on_reboot = "reset"
on_crash = "leave"
qemu_args = []

[ram]
prealloc = false

[boot]
kernel = "DIR/bzImage"
append = ""

[devices]
vga = false
agent = true
rng = true
vmgenid = true
"#
    );
}

#[test]
fn a_disk_with_a_server_is_not_cached_by_the_host_unless_it_is_given() {
    let dir = make_folder();
    let disk = |more: &str| {
        let text = format!("name = \"web\"\n[[disk]]\npath = \"disk.img\"\n{more}");
        parse(&dir, &text).disks.remove(0)
    };
    for served in ["", "server = true\n", "cache = \"none\"\n"] {
        assert_eq!((disk(served).server, disk(served).cache), (true, DiskCache::None), "{served}");
    }
    let whole = parse(&dir, "name = \"web\"\n[[disk]]\npath = \"disk.img\"\n");
    assert_eq!((whole.on_reboot, whole.on_crash), (OnReboot::WarmCache, OnCrash::WarmCache));
    let cached = disk("cache = \"writeback\"\n");
    assert_eq!((cached.server, cached.cache), (true, DiskCache::Writeback));
    // A disk that only QEMU can serve is served by QEMU, without a message.
    assert_eq!((disk("cache = \"unsafe\"\n").server, disk("server = false\n").server), (false, false));
    assert_eq!(disk("server = false\n").cache, DiskCache::Writeback);
    // As an older Rekindle without disk servers wrote its state.
    let mut json = serde_json::to_value(disk("")).unwrap();
    json.as_object_mut().unwrap().remove("server").unwrap();
    assert!(!serde_json::from_value::<Disk>(json).unwrap().server);
}

#[test]
fn a_disk_and_a_net_get_every_default() {
    let dir = make_folder();
    let vm = parse(
        &dir,
        "name = \"web\"\n[[disk]]\npath = \"./root.qcow2\"\n[[disk]]\npath = \"disk.img\"\n[[net]]\nkind = \"user\"\n[[net]]\nkind = \"tap\"\nnetns = \"blue\"\n",
    );
    let disk = |id: &str, file, format, server| Disk {
        id: id.into(),
        path: dir.path().join(file),
        format,
        readonly: false,
        cache: if server { DiskCache::None } else { DiskCache::Writeback },
        serial: None,
        server,
        redo: None,
        attic_keep: None,
        bps: None,
        iops: None,
    };
    assert_eq!(
        vm.disks,
        [disk("disk0", "root.qcow2", DiskFormat::Qcow2, false), disk("disk1", "disk.img", DiskFormat::Raw, true),]
    );
    assert_eq!(vm.boot, None);
    let user = NetBackend::User { forward: vec![] };
    let place = TapPlace::Netns { netns: "blue".into(), address: None };
    let tap = NetBackend::Tap { ifname: "web-net1".into(), queues: 1, vhost: false, place };
    let net = |id: &str, backend| Net { id: id.into(), mac: Mac::derived("web", id), backend };
    assert_eq!(vm.nets, [net("net0", user), net("net1", tap)]);
    let json = serde_json::to_value(&vm).unwrap();
    assert_eq!(json["net"][1]["kind"], "tap");
    assert_eq!(json["net"][1]["netns"], "blue");
    assert_eq!(json["disk"][0]["format"], "qcow2");
}

#[test]
fn load_starts_relative_paths_from_the_files_own_folder() {
    let dir = make_folder();
    let file = dir.path().join("web.toml");
    fs::write(&file, "name = \"web\"\nqemu = \"./bzImage\"\nsave_dir = \"ram\"\n[ram]\ndir = \"ram\"\n[boot]\nkernel = \"bzImage\"\n").unwrap();
    let vm = Definition::load(&file).unwrap();
    assert_eq!(vm.boot.unwrap().kernel, dir.path().join("bzImage"));
    assert_eq!((vm.ram.dir, vm.save_dir), (Some(dir.path().join("ram")), Some(dir.path().join("ram"))));
    assert_eq!(vm.qemu, dir.path().join("bzImage"));
    let errors = Definition::load(dir.path().join("none.toml")).unwrap_err().to_string();
    assert!(
        errors.ends_with("none.toml: cannot read the definition; write the path of the VM's TOML file: No such file or directory (os error 2)"),
        "{errors}"
    );
}

#[test]
fn all_mistakes_are_reported_together_in_the_order_of_the_file() {
    let dir = make_folder();
    let text = r#"memmory = "1G"
vcpus = 0
accel = "kvn"

[boot]
kernel = "vmlinuz"

[[disk]]
  pth = "disk.img"

[[net]]
kind = "tap"
forward = ["127.0.0.1:2222:22"]
"#;
    assert_eq!(
        errors_in(&dir, text),
        [
            "web.toml:1:1: unknown key `memmory`; did you mean `memory`?",
            "web.toml:1:1: `name` is missing; write for example name = \"web\" at the top",
            "web.toml:2:9: `vcpus = 0`: out of range; write a number from 1 to 255",
            "web.toml:3:9: `accel = \"kvn\"`: unknown; did you mean \"kvm\"?",
            "web.toml:6:10: `boot.kernel = \"vmlinuz\"`: no file DIR/vmlinuz; make it, or correct the path (a relative one starts from the definition's folder)",
            "web.toml:8:1: `disk.path` is missing; write for example path = \"disk.img\"",
            "web.toml:9:3: unknown key `disk.pth`; did you mean `path`?",
            "web.toml:11:1: a tap needs a place; write bridge = \"br0\" (a bridge of the host) or netns = \"blue\" (a network namespace)",
            "web.toml:13:11: `net.forward` is for kind = \"user\", but this net's kind is \"tap\"; change the kind or take `forward` out",
        ]
    );
}

#[test]
fn every_error_of_syntax_is_reported() {
    let messages = errors("memory = 512M\nvcpus = \n");
    assert_eq!(messages.len(), 2, "{messages:#?}");
    assert!(messages[0].starts_with("web.toml:2:") && messages[0].contains("not valid TOML: "), "{messages:#?}");
    assert!(messages[1].starts_with("web.toml:3:"), "{messages:#?}");
}

/// `messages.txt` has texts, each with its messages; to recreate it, delete all except the texts.
#[test]
fn every_message_names_key_value_and_hint() {
    let cases = include_str!("messages.txt").split("\n\n").filter(|case| !case.starts_with('#'));
    let mut count = 0;
    for case in cases {
        let (expected, lines): (Vec<&str>, Vec<&str>) = case.trim().lines().partition(|line| line.starts_with("=> "));
        let text = lines.join("\n");
        let actual: Vec<String> = errors(&text).into_iter().map(|line| format!("=> {line}")).collect();
        assert_eq!(actual, expected, "{text}\n{}", actual.join("\n"));
        count += 1;
    }
    assert!(count > 80, "only {count} cases");
}

#[test]
fn names_are_checked() {
    let dir = make_folder();
    let messages = errors_in(&dir, "name = \"Web\"\n[boot]\nkernel = \"bzImage\"");
    assert_eq!(
        messages,
        ["web.toml:1:8: `name = \"Web\"`: `W` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`"]
    );
}

#[test]
fn memory_on_huge_pages_is_a_multiple_of_them() {
    let flaw =
        |mib, huge: Option<u32>| parse::memory_flaw(Bytes::from_mib(mib), huge.map(Bytes::from_mib), "`ram.dir`");
    assert_eq!(flaw(3, None), None);
    assert_eq!(flaw(4, Some(2)), None);
    let message = "not a multiple of 2M, the page size of `ram.dir`; write \"2M\" or \"4M\"";
    assert_eq!(flaw(3, Some(2)).as_deref(), Some(message));
    let message = "not a multiple of 1G, the page size of `ram.dir`; write \"1G\"";
    assert_eq!(flaw(512, Some(1024)).as_deref(), Some(message));
}

#[test]
fn a_disk_may_be_read_twice_but_not_written_twice() {
    let dir = make_folder();
    let is_accepted = |first_readonly, second_readonly| {
        let text = format!(
            "name = \"web\"\n[[disk]]\npath = \"disk.img\"\nreadonly = {first_readonly}\n[[disk]]\npath = \"link.img\"\nreadonly = {second_readonly}\n"
        );
        Definition::parse(&text, dir.path(), "web.toml").is_ok()
    };
    assert!(is_accepted(true, true));
    assert!(!is_accepted(false, true) && !is_accepted(true, false) && !is_accepted(false, false));
}

#[test]
fn an_explicit_format_is_believed() {
    let dir = make_folder();
    let vm = parse(
        &dir,
        "name = \"web\"\n[[disk]]\npath = \"hidden.img\"\nformat = \"raw\"\n[[disk]]\npath = \"empty.img\"\n",
    );
    assert_eq!([vm.disks[0].format, vm.disks[1].format], [DiskFormat::Raw, DiskFormat::Raw]);
}

#[test]
fn what_cannot_be_carried_over_is_reported_with_the_reason() {
    let dir = make_folder();
    let uncarriable_of = |list: &[&str]| {
        let list = serde_json::to_string(list).unwrap();
        uncarriable(&parse(&dir, &format!("name = \"web\"\nqemu_args = {list}\n[boot]\nkernel = \"bzImage\"\n")))
    };
    assert!(
        uncarriable_of(&[
            "-device",
            "virtio-balloon-pci",
            "-netdev",
            "tap,id=x,vhost=off",
            "-s",
            "-device",
            "intel-iommu"
        ])
        .is_empty()
    );
    assert_eq!(
        uncarriable_of(&["-device", "vfio-pci,host=01:00.0", "-netdev", "tap,id=x,vhost=on"]),
        [
            "-device vfio-pci,host=01:00.0: the state of a passed-through host device is in the device, where a new QEMU cannot get it",
            "-netdev tap,id=x,vhost=on: the state of its queues is in the host's kernel",
        ]
    );
    for pair in [
        ["-device", "vhost-vsock-pci,guest-cid=3"],
        ["-device", "vhost-user-fs-pci,chardev=c"],
        ["--device", "driver=usb-host,hostbus=1"],
        ["-device", r#"{"driver":"nvme","serial":"x"}"#],
        ["-device", "ivshmem-plain,memdev=m"],
        ["-device", "nvdimm,memdev=m"],
        ["-device", "virtio-pmem-pci,memdev=m"],
        ["-object", "memory-backend-file,id=m,size=1G"],
        ["-object", r#"{"qom-type":"sev-guest","id":"s"}"#],
        ["-netdev", r#"{"type":"tap","id":"x","vhost":true}"#],
        ["-netdev", "vhost-user,id=x,chardev=c"],
        ["-tpmdev", "emulator,id=t,chardev=c"],
        ["-virtfs", "local,path=/srv"],
    ] {
        assert_eq!(uncarriable_of(&pair).len(), 1, "{pair:?}");
    }
}

#[test]
fn the_documented_examples_are_right() {
    let dir = make_folder();
    let book = include_str!("../../../../../docs/vm-definition.md");
    let examples: Vec<&str> = book.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(examples.len() >= 3);
    for example in examples {
        let vm = parse(&dir, example);
        assert_eq!(Definition::parse(&vm.to_toml().unwrap(), "/", "again").unwrap(), vm);
    }
    for (section, keys) in keys::SECTIONS {
        for key in *keys {
            assert!(
                book.contains(&format!("`{key}`")) || book.contains(&format!("[{key}]")),
                "{section}.{key} is not documented"
            );
        }
    }
}

/// Generates a name for an id, a bridge, a namespace or a type. It has at most 13 characters, because the kernel
/// permits 15 for a bridge.
fn any_word() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_-]{0,12}"
}

/// Generates where a tap is connected: a bridge, or a network namespace with or without an address.
fn any_tap_place() -> impl Strategy<Value = TapPlace> {
    let address = (any::<u32>(), 8u8..=30).prop_map(|(bits, prefix)| {
        // An address in 10.0.0.0/8 with a random network. In its host part only the highest bit is set, so that it is
        // neither the network's own address nor the broadcast address, which the parser rejects.
        let host = 1u32 << (31 - prefix);
        let ip = std::net::Ipv4Addr::from((bits & 0x00ff_ffff & !(u32::MAX >> prefix)) | 0x0a00_0000 | host);
        format!("{ip}/{prefix}").parse().unwrap()
    });
    prop_oneof![
        any_word().prop_map(|bridge| TapPlace::Bridge { bridge }),
        (any_word(), proptest::option::of(address)).prop_map(|(netns, address)| TapPlace::Netns { netns, address }),
    ]
}

/// Generates a user network, and up to two taps. There is only one user network with at most one forward, so
/// that no two forwards have the same port.
fn any_nets() -> impl Strategy<Value = Vec<Net>> {
    let forward = (any::<bool>(), 1u16.., 1u16..).prop_map(|(udp, port, guest_port)| Forward {
        protocol: if udp { Protocol::Udp } else { Protocol::Tcp },
        host: std::net::Ipv4Addr::LOCALHOST,
        port,
        guest_port,
    });
    let user =
        proptest::option::of(forward).prop_map(|forward| NetBackend::User { forward: forward.into_iter().collect() });
    // The name is set below: it must differ from those of the other taps.
    let tap = (any_tap_place(), 1..=8_u16, any::<bool>());
    let tap = tap.prop_map(|(place, queues, vhost)| NetBackend::Tap { ifname: String::new(), queues, vhost, place });
    let backends = (user, proptest::collection::vec(tap, 0..3));
    backends.prop_map(|(user, taps)| {
        let net = |(index, backend)| {
            let backend = match backend {
                NetBackend::Tap { queues, vhost, place, .. } => {
                    NetBackend::Tap { ifname: format!("t{index}"), queues, vhost, place }
                }
                user => user,
            };
            let id = format!("n{index}");
            Net { mac: Mac::derived("x", &id), id, backend }
        };
        std::iter::once(user).chain(taps).enumerate().map(net).collect()
    })
}

/// Generates a disk whose options do not conflict: only a raw image can have a disk server, and only a disk with a
/// server has `redo` and `attic_keep`.
fn any_disk(dir: PathBuf) -> impl Strategy<Value = Disk> {
    let cache = prop_oneof![
        Just(DiskCache::None),
        Just(DiskCache::Unsafe),
        Just(DiskCache::Directsync),
        Just(DiskCache::Writethrough)
    ];
    let rates = (proptest::option::of(65536u64..), proptest::option::of(1u32..));
    (any_word(), any::<(bool, bool, bool)>(), cache, proptest::option::of("[A-Za-z0-9._-]{1,20}"), rates).prop_map(
        move |(id, (qcow2, readonly, server), cache, serial, (bps, iops))| {
            let (file, format) = if qcow2 { ("root.qcow2", DiskFormat::Qcow2) } else { ("disk.img", DiskFormat::Raw) };
            let server = server && !qcow2;
            // The server accepts only `none` and `writeback`.
            let cache = if server { DiskCache::None } else { cache };
            Disk {
                id,
                path: dir.join(file),
                format,
                readonly,
                cache,
                serial,
                server,
                // The random rates also decide whether these two options are set.
                redo: bps.filter(|_| server).map(|_| dir.clone()),
                attic_keep: iops.filter(|_| server).map(|n| Span::from_millis(n.into())),
                bps: bps.map(Bytes::new),
                iops,
            }
        },
    )
}

/// Generates a valid definition with one disk. `has_options` and `rng` decide about several keys each.
fn any_definition(dir: PathBuf) -> impl Strategy<Value = Definition> {
    let disk = any_disk(dir.clone());
    let accel = prop_oneof![Just(Accel::Auto), Just(Accel::Kvm), Just(Accel::Tcg)];
    let scalars = ("[a-z0-9][a-z0-9._-]{0,62}", 1u32.., 1u8.., accel, 1u64.., any::<[bool; 7]>());
    // Values with every character that TOML must escape, but no control character.
    let texts =
        ("[^\\p{Cc}]{0,20}", proptest::collection::vec("[^\\p{Cc}\\s-][^\\p{Cc}]{0,10}", 0..3), any_word(), any_word());
    (scalars, texts, disk, any_nets()).prop_map(move |(scalars, (append, values, machine, cpu), disk, nets)| {
        let (name, mib, vcpus, accel, millis, [prealloc, initrd, vga, agent, rng, vmgenid, has_options]) = scalars;
        Definition {
            name: name.parse().unwrap(),
            memory: Bytes::from_mib(mib),
            vcpus,
            accel,
            machine,
            cpu: format!("m{cpu}"),
            // Any existing file will do for a path; a name is looked up in `PATH`.
            qemu: if has_options { dir.join("bzImage") } else { "qemu-kvm".into() },
            probe: has_options.then(|| "tcp://10.0.0.1:22".parse().unwrap()),
            shutdown_timeout: Span::from_millis(millis),
            // `phase` needs a phase that is saved, and `warm-cache` a disk with a server.
            on_reboot: match (disk.server, has_options, rng) {
                (true, true, true) => OnReboot::Phase,
                (true, true, false) => OnReboot::WarmCache,
                _ => OnReboot::Reset,
            },
            on_crash: if disk.server && vga { OnCrash::WarmCache } else { OnCrash::Leave },
            save_dir: has_options.then(|| dir.join("ram")),
            // `-set` is an option of QEMU that takes a value and that Rekindle permits.
            qemu_args: values.into_iter().flat_map(|value| ["-set".to_owned(), value]).collect(),
            ram: Ram { dir: has_options.then(|| dir.join("ram")), prealloc },
            boot: Some(Boot { kernel: dir.join("bzImage"), initrd: initrd.then(|| dir.join("initrd.img")), append }),
            devices: Devices { vga, agent, rng, vmgenid },
            phase: Phase {
                save: if disk.server && rng { vec!["kernel".into(), "services".into()] } else { Vec::new() },
                healthy: (disk.server && rng && agent).then(|| "services".into()),
            },
            disks: vec![disk],
            nets,
        }
    })
}

thread_local! {
    static FOLDER: TempDir = make_folder();
}

proptest! {
    #[test]
    fn what_is_written_reads_back(definition in FOLDER.with(|dir| any_definition(dir.path().to_owned()))) {
        let toml = definition.to_toml().unwrap();
        prop_assert_eq!(&Definition::parse(&toml, "/", "again").unwrap(), &definition);
        let json = serde_json::to_string(&definition).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Definition>(&json).unwrap(), &definition);
    }

    #[test]
    fn no_text_makes_it_panic(text in "(name|disk|net|boot|\\[\\[disk\\]\\]|\\[net\\]|[a-z=\"'\\[\\]{}\n.0-9é-]){0,40}") {
        let _ = Definition::parse(&text, "/", "x").map_err(|errors| errors.to_string());
    }
}
