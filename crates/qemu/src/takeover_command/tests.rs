//! Single options, and what cannot be taken over.

use super::vnc::{VncAddress, VncServer};
use super::*;
use crate::command::RamBackend;
use crate::foreign::{CurrentDisk, MachineFacts};
use crate::ramblock::RamBlock;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The facts of a machine with 128 MiB of RAM and these devices.
pub(super) fn facts(devices: &[&str]) -> RunningFacts {
    let bytes = 128 * MIB;
    let block = RamBlock { id: "pc.ram".into(), used: bytes, total: bytes, page_size: 4096, offset: 0, address: None };
    RunningFacts {
        machine: MachineFacts {
            machine: "pc-q35-7.2".into(),
            backends: vec![RamBackend { id: "pc.ram".into(), bytes }],
            main_backend: Some("pc.ram".into()),
            devices: devices.iter().map(|id| (*id).to_owned()).collect(),
            disks: Vec::new(),
            cwd: "/".into(),
        },
        ram_blocks: vec![block],
        ..RunningFacts::default()
    }
}

fn unix(path: &str) -> SourceDescriptor {
    SourceDescriptor::Listener(ListenAddress::Unix(path.into()))
}

fn tcp(address: &str) -> SourceDescriptor {
    SourceDescriptor::Listener(ListenAddress::Tcp(address.parse().unwrap()))
}

fn tap(interface: &str) -> SourceDescriptor {
    SourceDescriptor::Tap { interface: interface.into() }
}

pub(super) fn rewrite_line(
    line: &str,
    facts: &RunningFacts,
    open: &[(RawFd, SourceDescriptor)],
    syntax: Syntax,
) -> Result<CommandLine, Vec<Obstacle>> {
    let open = open.iter().cloned().collect();
    rewrite(&words(line), facts, &open, &destination(syntax))
}

fn destination(syntax: Syntax) -> Destination {
    Destination { label: "x".into(), syntax, socket_directory: Some("/domain".into()) }
}

/// Rewrites `-display none` and these options.
fn rewritten(options: &str, open: &[(RawFd, SourceDescriptor)]) -> CommandLine {
    rewrite_line(&format!("-display none {options}"), &facts(&[]), open, Syntax::default()).unwrap()
}

/// Returns what prevents a replacement.
fn refused(options: &str, facts: &RunningFacts, open: &[(RawFd, SourceDescriptor)]) -> Vec<String> {
    let obstacles = rewrite_line(&format!("-display none {options}"), facts, open, Syntax::default()).unwrap_err();
    obstacles.into_iter().map(|obstacle| obstacle.what).collect()
}

#[test]
fn a_plain_command_line() {
    let line = "-machine q35,accel=kvm -display none -m 128 -qmp unix:/q,server,nowait -serial file:/log -monitor \
                telnet:127.0.0.1:4444,server,nowait -mem-path /dev/hugepages -mem-prealloc -daemonize -loadvm a -S";
    let open = [(5, unix("/q")), (6, tcp("127.0.0.1:4444")), (9, tcp("127.0.0.1:1"))];
    let line = rewrite_line(line, &facts(&[]), &open, Syntax::default()).unwrap();
    let expected = "-machine type=pc-q35-7.2,accel=kvm -display none -m 128 \
         -chardev backend=socket,id=compat_monitor0,fd=10,server=on,wait=off -mon chardev=compat_monitor0,mode=control \
         -chardev backend=file,id=serial0,path=/log,append=on -serial chardev:serial0 \
         -chardev backend=socket,id=compat_monitor1,telnet=on,fd=11,server=on,wait=off \
         -mon chardev=compat_monitor1,mode=readline \
         -object qom-type=memory-backend-file,id=pc.ram,size=134217728,mem-path=/proc/self/fd/12,share=on,prealloc=off,\
         x-use-canonical-path-for-ramblock-id=off -machine memory-backend=pc.ram \
         -chardev socket,id=rekindle-x-qmp,fd=13,server=on,wait=off -mon chardev=rekindle-x-qmp,mode=control \
         -chardev socket,id=rekindle-x-watch,fd=14,server=on,wait=off -mon chardev=rekindle-x-watch,mode=control \
         -chardev socket,id=rekindle-x-protect,fd=15,server=on,wait=off -mon chardev=rekindle-x-protect,mode=control \
         -chardev socket,id=rekindle-x-save,fd=16,server=on,wait=off -mon chardev=rekindle-x-save,mode=control \
         -incoming defer -S";
    assert_eq!(line.arguments.join(" "), expected);
    assert_eq!(line.descriptors[&10], Descriptor::Listener { source: 5 });
    assert_eq!(line.descriptors[&11], Descriptor::Listener { source: 6 });
    let ram = Descriptor::Ram { block: "pc.ram".into(), bytes: 128 * MIB, page_bytes: 4096 };
    assert_eq!(line.descriptors[&12], ram);
    assert_eq!(line.descriptors[&16], Descriptor::OwnMonitor { name: "save" });
    assert_eq!(line.descriptors.len(), 7);
}

#[test]
fn the_name_of_a_ram_block_is_kept() {
    let mut facts = facts(&[]);
    facts.ram_blocks[0].id = "/objects/pc.ram".into();
    facts.ram_blocks[0].page_size = 2 * MIB;
    let options = "-display none -object memory-backend-memfd,id=pc.ram,size=128M,hugetlb=on,prealloc=on,policy=bind,host-nodes=0";
    let line = rewrite_line(options, &facts, &[], Syntax::default()).unwrap();
    let backend = "qom-type=memory-backend-file,id=pc.ram,size=128M,policy=bind,host-nodes=0,mem-path=/proc/self/fd/3,share=on,\
                   prealloc=off,x-use-canonical-path-for-ramblock-id=on";
    assert!(line.arguments.iter().any(|argument| argument == backend), "{:?}", line.arguments);
    let ram = Descriptor::Ram { block: "/objects/pc.ram".into(), bytes: 128 * MIB, page_bytes: 2 * MIB };
    assert_eq!(line.descriptors[&3], ram);
}

#[test]
fn taps_are_passed_as_descriptors() {
    let open = [(7, tap("t0")), (8, tap("t1")), (9, tap("t1")), (12, SourceDescriptor::VhostNet)];
    let options = "-netdev tap,id=a,ifname=t0,script=no,downscript=no -netdev tap,id=b,ifname=t1,queues=2,vhost=on";
    let line = rewritten(options, &open);
    let text = line.arguments.join(" ");
    assert!(text.contains("-netdev type=tap,id=a,fd=13 "), "{text}");
    assert!(text.contains("-netdev type=tap,id=b,vhost=on,fds=14:15,vhostfds=16:17 "), "{text}");
    assert_eq!(line.descriptors[&15], Descriptor::Tap { source: 9, interface: "t1".into() });
    assert_eq!(line.descriptors[&16], Descriptor::VhostNet);
    // The RAM and four monitors follow.
    let mut spare = line.spare_numbers();
    assert_eq!(spare.next(), Some(23));
    let slots = line.tap_slots(&mut spare).into_iter();
    let numbers: Vec<_> = slots.map(|slot| (slot.source, slot.destination, slot.waiting)).collect();
    assert_eq!(numbers, [(7, 13, 24), (8, 14, 25), (9, 15, 26)]);
    assert_eq!(spare.next(), Some(27));
    assert_eq!(refused("-netdev tap,id=a,ifname=t2", &facts(&[]), &open), ["network a"]);
    assert_eq!(refused("-netdev tap,id=a,fd=12", &facts(&[]), &open), ["network a"]);
}

#[test]
fn forwarded_ports_are_reported() {
    let options = "-netdev user,id=n,net=10.1.0.0/24,hostfwd=tcp::22-:22";
    let line = rewritten(options, &[]);
    assert_eq!(line.forwards, [Forward { network: Some("n".into()), rule: "tcp::22-:22".into() }]);
    let text = line.arguments.join(" ");
    assert!(text.contains("-netdev type=user,id=n,net=10.1.0.0/24 "), "{text}");
}

/// Family, host and service.
type Address = (&'static str, &'static str, &'static str);

/// The facts of a machine whose VNC servers listen there.
fn vnc_facts(servers: &[(&str, &[Address])]) -> RunningFacts {
    let address = |(family, host, service): &Address| VncAddress {
        family: (*family).into(),
        host: (*host).into(),
        service: (*service).into(),
        websocket: false,
    };
    let server = |(id, addresses): &(&str, &[Address])| VncServer {
        id: (*id).into(),
        addresses: addresses.iter().map(address).collect(),
    };
    RunningFacts { vnc_servers: servers.iter().map(server).collect(), ..facts(&[]) }
}

#[test]
fn a_vnc_server_gets_the_listening_sockets_that_qemu_reports() {
    let both: &[_] = &[("ipv4", "127.0.0.1", "5901"), ("ipv6", "::1", "5901")];
    let facts = vnc_facts(&[("default", both)]);
    let open = [(4, tcp("127.0.0.1:5901")), (5, tcp("[::1]:5901")), (6, tcp("127.0.0.1:5900"))];
    let line = rewrite_line("-vnc :1,to=9,password,share=ignore", &facts, &open, Syntax::default()).unwrap();
    assert!(line.arguments.join(" ").contains("-vnc vnc=none,password,share=ignore "), "{:?}", line.arguments);
    let server =
        PassedVncServer { id: "default".into(), listeners: vec![7, 8], stand_ins: Vec::new(), needs_password: true };
    assert_eq!(line.vnc_server, Some(server));
    assert_eq!(line.descriptors[&7], Descriptor::Duplicate { source: 4 });
    assert_eq!(line.descriptors[&8], Descriptor::Duplicate { source: 5 });

    // The QEMU of an earlier replacement has two descriptors of each socket, and no address on its command line.
    let facts = vnc_facts(&[("two", &[("unix", "", "/v")])]);
    let line = rewrite_line("-vnc vnc=none,id=two", &facts, &[(7, unix("/v")), (9, unix("/v"))], Syntax::default());
    let line = line.unwrap();
    let server =
        PassedVncServer { id: "two".into(), listeners: vec![10], stand_ins: Vec::new(), needs_password: false };
    assert_eq!((&line.descriptors[&10], line.vnc_server), (&Descriptor::Duplicate { source: 7 }, Some(server)));
}

#[test]
fn a_vnc_server_that_cannot_be_passed_on_is_named() {
    let one = vnc_facts(&[("default", &[("ipv4", "0.0.0.0", "5901")])]);
    assert_eq!(refused("-vnc :1", &one, &[(4, tcp("127.0.0.1:5901"))]), ["VNC server default"]);
    assert_eq!(refused("-vnc :1,id=other", &one, &[(4, tcp("0.0.0.0:5901"))]), ["VNC server other"]);
    let two = vnc_facts(&[("default", &[]), ("two", &[])]);
    assert_eq!(refused("-vnc none -vnc none,id=two", &two, &[]), ["VNC server default", "VNC server two"]);
}

/// The facts of a machine whose VNC server listens at the first address, and for websockets at the second.
fn websocket_facts(ordinary: Address, websocket: Address) -> RunningFacts {
    let mut facts = vnc_facts(&[("default", &[websocket, ordinary])]);
    facts.vnc_servers[0].addresses[0].websocket = true;
    facts
}

#[test]
fn a_vnc_server_with_a_websocket_gets_stand_ins() {
    let syntax = Syntax { websocket_paths: true, ..Syntax::default() };
    let given = "-vnc 127.0.0.1:1,password=on,websocket=5700,share=ignore";
    let facts = websocket_facts(("ipv4", "127.0.0.1", "5901"), ("ipv4", "127.0.0.1", "5700"));
    let open = [(4, tcp("127.0.0.1:5901")), (5, tcp("127.0.0.1:5700"))];
    let expected = "-vnc vnc=unix:/domain/rekindle-vnc-127.0.0.1:5901,password=on,share=ignore,\
                    websocket=unix:/domain/rekindle-websocket-127.0.0.1:5700 ";
    let stand_ins = |websocket, ordinary| {
        vec![
            StandIn { listener: websocket, path: "/domain/rekindle-websocket-127.0.0.1:5700".into(), is_removed: None },
            StandIn { listener: ordinary, path: "/domain/rekindle-vnc-127.0.0.1:5901".into(), is_removed: None },
        ]
    };
    let line = rewrite_line(given, &facts, &open, syntax).unwrap();
    assert!(line.arguments.join(" ").contains(expected), "{:?}", line.arguments);
    let server = line.vnc_server.unwrap();
    assert_eq!((server.listeners, server.stand_ins), (Vec::new(), stand_ins(6, 7)));
    assert!(server.needs_password);
    assert_eq!(line.descriptors[&6], Descriptor::Duplicate { source: 5 });
    assert_eq!(line.descriptors[&7], Descriptor::Duplicate { source: 4 });

    // After an earlier replacement, QEMU reports the stand-ins.
    let facts = websocket_facts(
        ("unix", "", "/domain/rekindle-vnc-127.0.0.1:5901"),
        ("unix", "", "/domain/rekindle-websocket-127.0.0.1:5700"),
    );
    let line = rewrite_line(expected.trim(), &facts, &open, syntax).unwrap();
    assert!(line.arguments.join(" ").contains(expected), "{:?}", line.arguments);
    assert_eq!(line.vnc_server.unwrap().stand_ins, stand_ins(6, 7));
}

#[test]
fn a_websocket_that_cannot_be_passed_on_is_named() {
    let syntax = Syntax { websocket_paths: true, ..Syntax::default() };
    let refused = |facts: &RunningFacts, open: &[_], syntax| {
        let obstacles = rewrite_line("-vnc :1,websocket=on", facts, open, syntax).unwrap_err();
        obstacles.into_iter().map(|obstacle| obstacle.what).collect::<Vec<_>>()
    };
    let tcp_only = websocket_facts(("ipv4", "127.0.0.1", "5901"), ("ipv4", "127.0.0.1", "5701"));
    let open = [(4, tcp("127.0.0.1:5901")), (5, tcp("127.0.0.1:5701"))];
    assert_eq!(refused(&tcp_only, &open, Syntax::default()), ["-vnc websocket"]);
    assert_eq!(refused(&tcp_only, &open[..1], syntax), ["VNC server default"]);
    let with_path = websocket_facts(("unix", "", "/v"), ("ipv4", "127.0.0.1", "5701"));
    assert_eq!(refused(&with_path, &[(4, unix("/v")), (5, tcp("127.0.0.1:5701"))], syntax), ["-vnc websocket"]);
}

#[test]
fn a_spice_server_gets_a_stand_in_and_its_listening_socket() {
    let given = "-spice port=5900,addr=127.0.0.1,ipv4=on,disable-ticketing=on -chardev spicevmc,id=c,name=vdagent \
                 -device qxl-vga,id=v";
    let facts = facts(&["v"]);
    let open = [(4, tcp("127.0.0.1:5900")), (6, tcp("127.0.0.1:5901"))];
    let line = rewrite_line(given, &facts, &open, Syntax::default()).unwrap();
    let text = line.arguments.join(" ");
    let server = "-spice port=5900,addr=/domain/rekindle-spice.sock,disable-ticketing=on,unix=on \
                  -chardev spicevmc,id=c,name=vdagent -device qxl-vga,id=v";
    assert!(text.contains(server), "{text}");
    let passed = |listener, path: &str, needs_password| {
        let stand_in = StandIn { listener, path: path.into(), is_removed: None };
        Some(PassedSpiceServer { stand_ins: vec![stand_in], needs_password })
    };
    assert_eq!(line.spice_server, passed(7, "/domain/rekindle-spice.sock", false));
    assert_eq!(line.descriptors[&7], Descriptor::Duplicate { source: 4 });

    // The QEMU of an earlier replacement has two descriptors of the socket.
    let again = "-spice port=5900,addr=/domain/rekindle-spice.sock,unix=on";
    let twice = [(7, tcp("127.0.0.1:5900")), (9, tcp("127.0.0.1:5900"))];
    let line = rewrite_line(again, &self::facts(&[]), &twice, Syntax::default()).unwrap();
    assert_eq!(line.spice_server, passed(10, "/domain/rekindle-spice.sock", true));

    for addr in ["/d/s", "/d/s.rekindle"] {
        let given = format!("-spice unix,addr={addr},disable-ticketing=on");
        let line = rewrite_line(&given, &self::facts(&[]), &[(4, unix("/d/s"))], Syntax::default()).unwrap();
        assert_eq!(line.spice_server, passed(5, "/d/s.rekindle", false));
    }
    // Its clients are passed to it one by one.
    assert_eq!(rewritten("-spice port=0,disable-ticketing=on", &[]).spice_server, None);
}

#[test]
fn a_spice_server_with_tls_gets_two_stand_ins_at_one_path() {
    const PATH: &str = "/domain/rekindle-spice.sock";
    let stand_in = |listener, is_removed| StandIn { listener, path: PATH.into(), is_removed: Some(is_removed) };
    let both = "port=5900,tls-port=5901,tls-channel=main,tls-channel=inputs,disable-ticketing=on";
    let open = [(4, tcp("127.0.0.1:5900")), (5, tcp("127.0.0.1:5901"))];
    // The command line of an earlier replacement, too.
    for address in ["addr=127.0.0.1".to_owned(), format!("unix=on,addr={PATH}")] {
        let line = rewrite_line(&format!("-spice {both},{address}"), &facts(&[]), &open, Syntax::default()).unwrap();
        let spice = line.arguments.iter().skip_while(|word| *word != "-spice").nth(1).unwrap();
        assert!(spice.starts_with(both) && spice.contains("unix=on") && spice.contains(PATH), "{spice}");
        assert_eq!(line.spice_server.unwrap().stand_ins, [stand_in(6, true), stand_in(7, false)]);
        assert_eq!(line.descriptors[&6], Descriptor::Duplicate { source: 4 });
        assert_eq!(line.descriptors[&7], Descriptor::Duplicate { source: 5 });
    }
    let line = rewrite_line("-spice tls-port=5901", &facts(&[]), &open, Syntax::default()).unwrap();
    assert_eq!(line.spice_server.unwrap().stand_ins, [stand_in(6, false)]);
}

#[test]
fn a_spice_server_that_cannot_be_passed_on_is_named() {
    let two = [(4, tcp("127.0.0.1:5900")), (5, tcp("127.0.0.2:5900"))];
    assert_eq!(refused("-spice port=5900", &facts(&[]), &two), ["-spice"]);
    assert_eq!(refused("-spice port=5900,tls-port=5901", &facts(&[]), &two[..1]), ["-spice"]);
    assert_eq!(refused("-spice tls-port=5901,unix=on,addr=/s", &facts(&[]), &[(4, unix("/s"))]), ["-spice"]);
}

#[test]
fn connections_have_the_syntax_of_the_destination() {
    let reconnects = |options: &str, reconnect_ms| {
        let syntax = Syntax { reconnect_ms, ..Syntax::default() };
        rewrite_line(options, &facts(&[]), &[], syntax).unwrap().arguments[3].clone()
    };
    let (seconds, milliseconds) =
        ("-display none -chardev socket,id=a,path=/s,reconnect=5", "backend=socket,id=a,path=/s,reconnect-ms=5000");
    assert_eq!(reconnects(seconds, true), milliseconds);
    assert_eq!(reconnects(seconds, false), "socket,id=a,path=/s,reconnect=5");
    let seconds = "backend=socket,id=a,path=/s,reconnect=1";
    assert_eq!(reconnects("-display none -chardev socket,id=a,path=/s,reconnect-ms=100", false), seconds);
}

#[test]
fn a_set_of_descriptors_gets_the_one_that_qemu_has_now() {
    let mut facts = facts(&[]);
    facts.fd_sets.insert(3, vec![21]);
    let options = "-display none -add-fd fd=40,set=3 -chardev file,id=a,path=/dev/fdset/3,append=on";
    let line = rewrite_line(options, &facts, &[], Syntax::default()).unwrap();
    assert_eq!(line.descriptors[&40], Descriptor::Duplicate { source: 21 });
    assert_eq!(
        refused("-chardev file,id=a,path=/dev/fdset/4,append=on", &facts, &[]),
        ["file,id=a,path=/dev/fdset/4,append=on"]
    );
}

#[test]
fn everything_that_cannot_be_taken_over_is_named() {
    let cases = [
        ("-device vfio-pci,host=1", "-device vfio-pci"),
        ("-device virtio-mem-pci,memdev=m", "-device virtio-mem-pci"),
        ("-object input-linux,id=k,evdev=/dev/input/event0", "-object input-linux,id=k"),
        ("-object sev-guest,id=s", "-object sev-guest,id=s"),
        ("-machine q35,confidential-guest-support=s", "-machine confidential-guest-support"),
        ("-chardev socket,id=c,host=h,port=1", "-chardev c"),
        ("-chardev socket,id=c,path=/gone,server=on", "-chardev c"),
        ("-chardev socket,id=c,fd=5,server=on", "-chardev c"),
        ("-chardev pipe,id=c,path=/p", "-chardev c"),
        ("-serial stdio", "-serial stdio"),
        ("-netdev vhost-user,id=n,chardev=c", "-netdev vhost-user,id=n"),
        ("-netdev stream,id=n,addr.type=unix,addr.path=/p", "-netdev stream,id=n"),
        ("-nic tap,ifname=t0", "-nic tap,ifname=t0"),
        ("-spice port=1", "-spice"),
        ("-display gtk", "-display gtk"),
        ("-drive file=/d,snapshot=on", "-drive file=/d,snapshot=on"),
        ("-set netdev.n.vhost=on", "-set netdev.n.vhost=on"),
        ("-run-with chroot=/c", "-run-with chroot"),
        ("-readconfig /c", "-readconfig"),
        ("-gdb tcp::1", "-gdb"),
        ("-frobnicate", "-frobnicate"),
    ];
    for (options, expected) in cases {
        assert_eq!(refused(options, &facts(&[]), &[]), [expected], "{options}");
    }
    // All at the same time.
    let options = "-gdb tcp::1 -spice port=1 -chardev pipe,id=c,path=/p";
    assert_eq!(refused(options, &facts(&[]), &[]), ["-chardev c", "-gdb", "-spice"]);
}

#[test]
fn what_changed_while_the_guest_ran_is_named() {
    let mut facts = facts(&["plugged", "disk", "cd"]);
    facts.machine.backends.push(RamBackend { id: "dimm".into(), bytes: MIB });
    facts.machine.disks = vec![CurrentDisk { device: "disk".into(), node: "snapshot".into() }];
    let drive = |device: &str, file: Option<&str>, nodes: &[&str]| Drive {
        device: device.into(),
        file: file.map(str::to_owned),
        nodes: nodes.iter().map(|name| (*name).to_owned()).collect(),
        storages: BTreeMap::new(),
        tray_open: false,
    };
    facts.drives = vec![drive("disk", Some("/overlay"), &["snapshot", "base"]), drive("cd", None, &[])];
    let options = "-blockdev file,node-name=base,filename=/d -device virtio-blk-pci,id=disk,drive=base \
                   -drive if=none,id=iso,file=/i -device ide-cd,id=cd,drive=iso";
    let expected = ["device plugged", "disk cd", "disk disk", "memory backend dimm"];
    assert_eq!(refused(options, &facts, &[]), expected);
}

#[test]
fn locked_memory_is_named() {
    assert_eq!(refused("-overcommit mem-lock=on", &facts(&[]), &[]), ["-overcommit mem-lock"]);
    assert_eq!(refused("-overcommit mem-lock=on-fault", &facts(&[]), &[]), ["-overcommit mem-lock"]);
    let kept = rewritten("-overcommit mem-lock=off,cpu-pm=on", &[]).arguments.join(" ");
    assert!(kept.contains("-overcommit mem-lock=off,cpu-pm=on"), "{kept}");
}

#[test]
fn the_terminal_of_a_daemon_is_no_obstacle() {
    let open = [(0, SourceDescriptor::Null)];
    let line = rewritten("-nographic", &open);
    assert!(line.arguments.contains(&"-nographic".to_owned()));
    assert_eq!(refused("-nographic", &facts(&[]), &[]), ["-nographic"]);
    let obstacles = rewrite_line("-m 128", &facts(&[]), &open, Syntax::default()).unwrap_err();
    assert_eq!(obstacles[0].what, "the default display");
}

proptest! {
    #[test]
    fn no_argument_makes_it_panic(words in proptest::collection::vec("(-chardev|-netdev|-object|-serial|-vnc|[a-z=,:0-9-]{0,30})", 0..8)) {
        let open = BTreeMap::from([(i32::MAX, unix("/q"))]);
        if let Ok(line) = rewrite(&words, &facts(&[]), &open, &destination(Syntax::default())) {
            prop_assert!(line.arguments.ends_with(&["-incoming".to_owned(), "defer".to_owned(), "-S".to_owned()]));
        }
    }
}
