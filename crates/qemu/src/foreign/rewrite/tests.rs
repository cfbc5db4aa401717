//! Command lines as users and libvirt write them, and their rewritten form.

use super::*;
use crate::command::{Directory, Hardware, Net, NetBackend, RamBackend, Start};
use crate::foreign::CurrentDisk;
use crate::syntax::Syntax;
use proptest::prelude::*;
use std::path::Path;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn backend(id: &str, mib: u64) -> RamBackend {
    RamBackend { id: id.into(), bytes: mib << 20 }
}

/// The facts of a machine with 512 MiB of RAM and these devices.
fn facts(devices: &[&str]) -> MachineFacts {
    MachineFacts {
        machine: "pc-q35-7.2".into(),
        backends: vec![backend("pc.ram", 512)],
        main_backend: Some("pc.ram".into()),
        devices: devices.iter().map(|id| (*id).to_owned()).collect(),
        disks: Vec::new(),
        cwd: "/".into(),
    }
}

fn hardware(machine: ForeignMachine) -> Hardware {
    let nets = machine.networks.iter().map(|network| Net {
        id: network.id.clone(),
        mac: network.mac.clone(),
        backend: NetBackend::User(network.forwards.clone()),
    });
    Hardware {
        nets: nets.collect(),
        vm_generation: Some(uuid::Uuid::from_u128(7)),
        foreign: Some(machine),
        ..Hardware::bare(512 << 20)
    }
}

/// Returns the command line that builds the machine again.
fn rebuilt(machine: ForeignMachine) -> String {
    rebuilt_for(machine, Syntax::default())
}

fn rebuilt_for(machine: ForeignMachine, syntax: Syntax) -> String {
    let hardware = hardware(machine);
    hardware.arguments(&Directory("/run/x".into()), Path::new("/run/x/console.log"), Start::Incoming, syntax).join(" ")
}

#[test]
fn a_plain_command_line() {
    let line = "-machine q35,accel=kvm,smm=off -m 512 -smp 2 -cpu max -nodefaults -kernel /k -append console=ttyS0 -serial stdio \
                -netdev user,id=net0,hostfwd=tcp::22-:22,net=10.1.0.0/24 -device virtio-net-pci,netdev=net0,mac=52:54:00:00:00:01 \
                -device vmgenid,guid=auto -qmp unix:/q,server,nowait -daemonize -pidfile p -S -display none";
    let machine = rewrite(&words(line), &facts(&[])).unwrap();
    assert_eq!(machine.networks[0].mac, "52:54:00:00:00:01");
    let text = rebuilt(machine);
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
    let machine = rewrite(&line, &facts(&["serial0", "channel0", "net0"])).unwrap();
    assert_eq!((machine.console.as_deref(), machine.agent.as_deref()), (Some("charserial0"), Some("charchannel0")));
    assert!(machine.networks[0].needs_tap && machine.networks[0].kind == "tap");
    assert_eq!(machine.networks[0].mac, "52:54:00:aa:bb:cc");
    let text = rebuilt(machine);
    for part in [
        "socket,id=charserial0,path=/run/x/console.sock,server=on,wait=off,logfile=/run/x/console.log",
        "socket,id=charchannel0,path=/run/x/agent.sock",
        "-chardev null,id=charmonitor",
        "-uuid 1d5f8b43-6b5d-4e5e-8f8c-9d3c8a9a0001",
        r#"{"driver":"none","id":"audio1"}"#,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for gone in ["masterKey0", "fd=", "no-shutdown", "memory-backend-ram", "chardev=charmonitor", "-sandbox"] {
        assert!(!text.contains(gone), "{gone} in {text}");
    }
}

#[test]
fn options_that_later_qemus_do_not_know_are_written_so_that_all_do() {
    let line = "-machine q35 -no-acpi -no-hpet -m 512 -chardev socket,id=c,path=/q,reconnect=1 -mon chardev=m -nodefaults \
                -chardev socket,id=m,path=/m,server=on -object monitor-qmp,id=mon1,chardev=m,pretty=on";
    let machine = rewrite(&words(line), &facts(&[])).unwrap();
    let newest =
        Syntax { reconnect_ms: true, monitor_objects: true, thread_names: true, websocket_paths: true, sandbox: true };
    for syntax in [Syntax::default(), newest] {
        let text = rebuilt_for(machine.clone(), syntax);
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
    let machine = rewrite(&line, &facts(&[])).unwrap();
    assert_eq!(machine.networks[0].forwards, ["tcp::1-:2", "tcp::3-:4"]);
    let text = rebuilt(machine);
    let json = r#"{"hostfwd":[{"str":"tcp::1-:2"},{"str":"tcp::3-:4"}],"id":"a","type":"user"}"#;
    assert!(text.contains(json) && text.contains("id=b,hostfwd=tcp::5-:6,hostfwd=tcp::7-:8"), "{text}");
}

#[test]
fn the_queues_of_a_tap_are_counted() {
    for (netdev, queues) in [
        ("tap,id=n,fds=31:32:33,vhost=on,vhostfds=34:35:36", 3),
        (r#"{"type":"tap","id":"n","fds":"31:32"}"#, 2),
        ("tap,id=n,ifname=t,queues=4", 4),
        ("tap,id=n,fd=31", 1),
    ] {
        let line = format!("-netdev {netdev} -device virtio-net-pci,netdev=n,id=c");
        let machine = rewrite(&words(&line), &facts(&["c"])).unwrap();
        assert_eq!(machine.networks[0].queues, queues, "{netdev}");
    }
}

#[test]
fn defaults_stay_defaults() {
    let text = rebuilt(rewrite(&words("/disk.img -nographic"), &facts(&[])).unwrap());
    let parts = ["-hda /disk.img", "graphics=off", "-serial chardev:rekindle-console", "-parallel null", "-m 524288K"];
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn several_backends_are_several_files() {
    let line = "-machine pc -m 1G -object memory-backend-ram,id=a,size=512M -object memory-backend-memfd,id=b,size=512M,share=on \
                -numa node,memdev=a -numa node,memdev=b -nodefaults";
    let backends = vec![backend("a", 512), backend("b", 512)];
    let facts = MachineFacts { backends, main_backend: None, ..facts(&[]) };
    let machine = rewrite(&words(line), &facts).unwrap();
    assert_eq!(hardware(machine.clone()).ram_ids(), ["a", "b"]);
    let text = rebuilt(machine);
    assert!(text.contains("id=a,size=536870912,mem-path=/ram/x.ram,"), "{text}");
    assert!(text.contains("id=b,size=536870912,mem-path=/ram/x.1.ram,"), "{text}");
    assert!(!text.contains("memory-backend=") && text.contains("-numa node,memdev=b"), "{text}");
}

#[test]
fn obstacles_are_named() {
    let obstacles = |line: &str, facts: &MachineFacts| {
        let obstacles = rewrite(&words(line), facts).unwrap_err();
        obstacles.into_iter().map(|obstacle| format!("{}: {}\n", obstacle.what, obstacle.why)).collect::<String>()
    };
    let without_devices = facts(&[]);
    for (line, named) in [
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
        let text = obstacles(line, &without_devices);
        assert!(text.contains(named), "{line}: {text}");
    }
    assert!(obstacles("-nodefaults", &facts(&["hot"])).contains("device hot: it was plugged in"));
    let with_dimm = MachineFacts { backends: vec![backend("pc.ram", 512), backend("dimm0", 64)], ..facts(&[]) };
    assert!(obstacles("-nodefaults", &with_dimm).contains("memory backend dimm0: memory that was plugged in"));
    let disk = CurrentDisk { device: "/machine/peripheral/d0/virtio-backend".into(), node: "overlay".into() };
    let with_snapshot = MachineFacts { disks: vec![disk], ..facts(&["d0"]) };
    let line = "-blockdev driver=raw,node-name=base,file=f -device virtio-blk-pci,id=d0,drive=base";
    assert!(obstacles(line, &with_snapshot).contains("disk d0: the command line gives it base, but it shows overlay"));
}

proptest! {
    #[test]
    fn no_command_line_makes_it_panic(line in proptest::collection::vec("(-{0,2}(device|object|netdev|chardev|machine|serial|m|x))|[a-z=,{}\":]{0,20}", 0..12)) {
        let _ = rewrite(&line, &facts(&[]));
    }

    #[test]
    fn what_the_guest_sees_is_kept_word_for_word(value in "[a-zA-Z0-9=:/., -]{1,30}") {
        let line: Vec<String> = ["-append", &value, "-smbios", &value, "-cpu", &value].map(str::to_owned).into();
        let machine = rewrite(&line, &facts(&[])).unwrap();
        prop_assert!(machine.arguments.windows(6).any(|arguments| arguments == line.as_slice()));
    }
}
