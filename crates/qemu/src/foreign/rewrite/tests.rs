//! Command lines as users and libvirt write them, and their rewritten form.

use super::*;
use crate::command::{Directory, Hardware, Net, NetBackend, Ram, Start};
use crate::syntax::Syntax;
use proptest::prelude::*;
use std::path::Path;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn backend(id: &str, mib: u64) -> RamBackend {
    RamBackend { id: id.into(), bytes: mib << 20 }
}

fn facts(devices: &[&str]) -> Facts {
    Facts {
        machine: "pc-q35-7.2".into(),
        backends: vec![backend("pc.ram", 512)],
        main: Some("pc.ram".into()),
        devices: devices.iter().map(|id| (*id).to_owned()).collect(),
        disks: Vec::new(),
        cwd: "/".into(),
    }
}

fn hardware(foreign: Foreign) -> Hardware {
    let nets = foreign.networks.iter().map(|network| Net {
        id: network.id.clone(),
        mac: network.mac.clone(),
        backend: NetBackend::User(network.forwards.clone()),
    });
    Hardware {
        name: "x".into(),
        uuid: None,
        machine: "pc-q35-7.2".into(),
        cpu: String::new(),
        accel: "tcg".into(),
        vcpus: 1,
        ram: Ram { path: "/ram/x.ram".into(), bytes: 512 << 20, prealloc: false },
        boot: None,
        disks: Vec::new(),
        nets: nets.collect(),
        vga: false,
        agent: false,
        agent_ports: None,
        phase: false,
        panic: false,
        rng: false,
        vm_generation: Some(uuid::Uuid::from_u128(7)),
        extra: Vec::new(),
        foreign: Some(foreign),
    }
}

fn built(foreign: Foreign) -> String {
    built_for(foreign, Syntax::default())
}

fn built_for(foreign: Foreign, syntax: Syntax) -> String {
    let hardware = hardware(foreign);
    hardware.arguments(&Directory("/run/x".into()), Path::new("/run/x/console.log"), Start::Incoming, syntax).join(" ")
}

#[test]
fn a_plain_command_line() {
    let line = "-machine q35,accel=kvm,smm=off -m 512 -smp 2 -cpu max -nodefaults -kernel /k -append console=ttyS0 -serial stdio \
                -netdev user,id=net0,hostfwd=tcp::22-:22,net=10.1.0.0/24 -device virtio-net-pci,netdev=net0,mac=52:54:00:00:00:01 \
                -device vmgenid,guid=auto -qmp unix:/q,server,nowait -daemonize -pidfile p -S -display none";
    let foreign = rewrite(&words(line), &facts(&[])).unwrap();
    assert_eq!(foreign.networks[0].mac, "52:54:00:00:00:01");
    let text = built(foreign);
    for part in [
        "-machine type=pc-q35-7.2,smm=off,memory-backend=pc.ram,suppress-vmdesc=on",
        "-object memory-backend-file,id=pc.ram,size=536870912,mem-path=/ram/x.ram,share=on",
        "-netdev type=user,id=net0,net=10.1.0.0/24,hostfwd=tcp::22-:22",
        "-device virtio-net-pci,netdev=net0,mac=52:54:00:00:00:01",
        "-device driver=vmgenid,guid=00000000-0000-0000-0000-000000000007",
        "-serial chardev:rekindle-console",
        "socket,id=rekindle-console,path=/run/x/console.sock",
        "-m 512 -smp 2 -cpu max -nodefaults -kernel /k -append console=ttyS0",
        "-accel tcg,thread=multi",
        "-incoming defer -S",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for gone in ["kvm", "unix:/q", "daemonize", "stdio", "pidfile p"] {
        assert!(!text.contains(gone), "{gone} in {text}");
    }
}

#[test]
fn a_command_line_of_libvirt() {
    let line = [
        "-name",
        "guest=dom,debug-threads=on",
        "-S",
        "-object",
        r#"{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/x/master-key.aes"}"#,
        "-machine",
        "pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram",
        "-accel",
        "tcg",
        "-m",
        "512",
        "-object",
        r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":536870912}"#,
        "-uuid",
        "1d5f8b43-6b5d-4e5e-8f8c-9d3c8a9a0001",
        "-no-user-config",
        "-nodefaults",
        "-chardev",
        "socket,id=charmonitor,fd=29,server=on,wait=off",
        "-mon",
        "chardev=charmonitor,id=monitor,mode=control",
        "-no-shutdown",
        "-chardev",
        "pty,id=charserial0",
        "-device",
        r#"{"driver":"isa-serial","chardev":"charserial0","id":"serial0","index":0}"#,
        "-chardev",
        "socket,id=charchannel0,fd=30,server=on,wait=off",
        "-device",
        r#"{"driver":"virtserialport","bus":"v.0","nr":1,"chardev":"charchannel0","id":"channel0","name":"org.qemu.guest_agent.0"}"#,
        "-netdev",
        r#"{"type":"tap","fd":"31","id":"hostnet0"}"#,
        "-device",
        r#"{"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"52:54:00:aa:bb:cc"}"#,
        "-audiodev",
        r#"{"id":"audio1","driver":"spice"}"#,
        "-sandbox",
        "on,obsolete=deny",
        "-msg",
        "timestamp=on",
    ];
    let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
    let foreign = rewrite(&line, &facts(&["serial0", "channel0", "net0"])).unwrap();
    assert_eq!((foreign.console.as_deref(), foreign.agent.as_deref()), (Some("charserial0"), Some("charchannel0")));
    assert!(foreign.networks[0].needs_tap && foreign.networks[0].kind == "tap");
    assert_eq!(foreign.networks[0].mac, "52:54:00:aa:bb:cc");
    let text = built(foreign);
    for part in [
        "socket,id=charserial0,path=/run/x/console.sock,server=on,wait=off,logfile=/run/x/console.log",
        "socket,id=charchannel0,path=/run/x/agent.sock",
        "-chardev null,id=charmonitor",
        "-uuid 1d5f8b43-6b5d-4e5e-8f8c-9d3c8a9a0001",
        "-sandbox on,obsolete=deny",
        r#"{"driver":"none","id":"audio1"}"#,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for gone in ["masterKey0", "fd=", "no-shutdown", "memory-backend-ram", "chardev=charmonitor"] {
        assert!(!text.contains(gone), "{gone} in {text}");
    }
}

#[test]
fn options_that_later_qemus_do_not_know_are_written_so_that_all_do() {
    let line = "-machine q35 -no-acpi -no-hpet -m 512 -chardev socket,id=c,path=/q,reconnect=1 -mon chardev=m -nodefaults \
                -chardev socket,id=m,path=/m,server=on -object monitor-qmp,id=mon1,chardev=m,pretty=on";
    let foreign = rewrite(&words(line), &facts(&[])).unwrap();
    let newest = Syntax { reconnect_ms: true, monitor_objects: true, thread_names: true };
    for syntax in [Syntax::default(), newest] {
        let text = built_for(foreign.clone(), syntax);
        assert!(text.contains("-machine type=pc-q35-7.2,acpi=off,hpet=off,"), "{text}");
        for gone in ["-no-acpi", "-no-hpet", "reconnect", "mon1", "chardev=m "] {
            assert!(!text.contains(gone), "{gone} in {text}");
        }
        assert_eq!(text.contains("-mon "), !syntax.monitor_objects, "{text}");
        assert_eq!(text.contains("-object monitor-qmp,id=rekindle-qmp-monitor"), syntax.monitor_objects, "{text}");
    }
}

#[test]
fn ports_are_forwarded_in_either_form() {
    let line = [
        "-netdev",
        r#"{"type":"user","id":"a","hostfwd":[{"str":"tcp::1-:2"},{"str":"tcp::3-:4"}]}"#,
        "-netdev",
        "user,id=b,hostfwd=tcp::5-:6,hostfwd=tcp::7-:8",
    ];
    let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
    let foreign = rewrite(&line, &facts(&[])).unwrap();
    assert_eq!(foreign.networks[0].forwards, ["tcp::1-:2", "tcp::3-:4"]);
    let text = built(foreign);
    let json = r#"{"hostfwd":[{"str":"tcp::1-:2"},{"str":"tcp::3-:4"}],"id":"a","type":"user"}"#;
    assert!(text.contains(json) && text.contains("id=b,hostfwd=tcp::5-:6,hostfwd=tcp::7-:8"), "{text}");
}

#[test]
fn defaults_stay_defaults() {
    let foreign = rewrite(&words("/disk.img -nographic"), &facts(&[])).unwrap();
    let text = built(foreign);
    let has = |part: &str| assert!(text.contains(part), "{part} in {text}");
    has("-hda /disk.img");
    has("graphics=off");
    has("-serial chardev:rekindle-console");
    has("-parallel null");
    has("-m 524288K");
}

#[test]
fn several_backends_are_several_files() {
    let line = "-machine pc -m 1G -object memory-backend-ram,id=a,size=512M -object memory-backend-memfd,id=b,size=512M,share=on \
                -numa node,memdev=a -numa node,memdev=b -nodefaults";
    let facts = Facts { backends: vec![backend("a", 512), backend("b", 512)], main: None, ..facts(&[]) };
    let foreign = rewrite(&words(line), &facts).unwrap();
    assert_eq!(foreign.ram_ids().collect::<Vec<_>>(), ["a", "b"]);
    let text = built(foreign);
    assert!(text.contains("id=a,size=536870912,mem-path=/ram/x.ram,"), "{text}");
    assert!(text.contains("id=b,size=536870912,mem-path=/ram/x.1.ram,"), "{text}");
    assert!(!text.contains("memory-backend=") && text.contains("-numa node,memdev=b"), "{text}");
}

#[test]
fn what_cannot_be_carried_over_is_named() {
    let with = |line: &str, facts: &Facts| {
        let found = rewrite(&words(line), facts).unwrap_err();
        found.into_iter().map(|one| format!("{}: {}\n", one.what, one.why)).collect::<String>()
    };
    let plain = facts(&[]);
    for (line, what) in [
        ("-snapshot", "-snapshot"),
        ("-kernel none/such", "there is no none/such"),
        ("-frobnicate", "-frobnicate"),
        ("-readconfig x", "-readconfig"),
        ("-device qxl-vga", "qxl"),
        ("-device nvme,serial=x", "nvme"),
        ("-nic tap", "-nic tap"),
        ("-object filter-dump,id=f", "filter-dump"),
        ("-object secret,id=s,data=x -blockdev driver=luks,node-name=n,key-secret=s,file=f", "the secret s"),
        ("-drive file=/dev/fdset/2", "/dev/fdset/2"),
        ("-device virtio-balloon-pci,id=b", "device b: it was unplugged"),
        ("-object memory-backend-ram,id=gone,size=1G", "memory backend gone"),
        ("-device a,=b", "nothing before"),
    ] {
        let error = with(line, &plain);
        assert!(error.contains(what), "{line}: {error}");
    }
    assert!(with("-nodefaults", &facts(&["hot"])).contains("device hot: it was plugged in"));
    let more = Facts { backends: vec![backend("pc.ram", 512), backend("dimm0", 64)], ..facts(&[]) };
    assert!(with("-nodefaults", &more).contains("memory backend dimm0: memory that was plugged in"));
    let disks = vec![("/machine/peripheral/d0/virtio-backend".to_owned(), "overlay".to_owned())];
    let changed = Facts { disks, ..facts(&["d0"]) };
    let line = "-blockdev driver=raw,node-name=base,file=f -device virtio-blk-pci,id=d0,drive=base";
    assert!(with(line, &changed).contains("disk d0: the command line gives it base, but it shows overlay"));
}

proptest! {
    #[test]
    fn no_command_line_makes_it_panic(line in proptest::collection::vec("(-{0,2}(device|object|netdev|chardev|machine|serial|m|x))|[a-z=,{}\":]{0,20}", 0..12)) {
        let _ = rewrite(&line, &facts(&[]));
    }

    #[test]
    fn what_the_guest_sees_is_kept_word_for_word(value in "[a-zA-Z0-9=:/., -]{1,30}") {
        let line: Vec<String> = ["-append", &value, "-smbios", &value, "-cpu", &value].map(str::to_owned).into();
        let foreign = rewrite(&line, &facts(&[])).unwrap();
        prop_assert!(foreign.words.windows(6).any(|words| words == line.as_slice()));
    }
}
