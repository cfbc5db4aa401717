//! Command lines that reach the host, and command lines that do not.

use super::*;
use crate::command::{ForeignNetwork, Net, Tap};

fn machine(arguments: &[&str]) -> ForeignMachine {
    ForeignMachine {
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        backends: Vec::new(),
        networks: Vec::new(),
        console: None,
        agent: None,
        cpu: crate::cpu::Features::new(),
        overlays: Vec::new(),
        domain_xml: None,
        has_tpm_emulator: false,
    }
}

fn access(arguments: &[&str]) -> Vec<HostAccess> {
    of_foreign(&Hardware::bare(1 << 20), &machine(arguments))
}

#[test]
fn arguments_that_only_describe_the_machine_pass() {
    for arguments in [
        ["-machine", "type=pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram,suppress-vmdesc=on"],
        ["-device", r#"{"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0","addr":"0x2"}"#],
        ["-device", "virtio-net-pci,netdev=net0,mac=52:54:00:00:00:01,romfile="],
        ["-global", "ICH9-LPC.disable_s3=1"],
        ["-global", "driver=cfi.pflash01,property=secure,value=on"],
        ["-object", r#"{"qom-type":"rng-random","id":"rng0","filename":"/dev/urandom"}"#],
        ["-object", "iothread,id=io1"],
        ["-chardev", "null,id=charchannel0"],
        ["-serial", "chardev:charserial0"],
        ["-audiodev", "driver=none,id=audio1"],
        ["-append", "console=ttyS0 root=/dev/vda"],
        ["-boot", "strict=on"],
        ["-smbios", "type=1,product=x/y"],
        ["-nic", "user,model=virtio-net-pci"],
        ["-cpu", "max"],
        ["-icount", "auto"],
    ] {
        assert_eq!(access(&arguments), [], "{arguments:?}");
    }
}

#[test]
fn everything_that_may_reach_the_host_is_named() {
    for arguments in [
        ["-netdev", "tap,id=n,script=/tmp/x"],
        ["-netdev", "user,id=n,guestfwd=tcp:10.0.2.9:1-cmd:id"],
        ["-nic", "user,smb=/"],
        ["-nic", "tap,script=/tmp/x"],
        ["-chardev", "file,id=c,path=/etc/cron.d/x"],
        ["-chardev", "null,id=c,logfile=/etc/cron.d/x"],
        ["-serial", "file:/etc/cron.d/x"],
        ["-monitor", "unix:/tmp/m,server,nowait"],
        ["-qmp", "tcp::4444,server"],
        ["-device", "virtio-net-pci,romfile=/etc/shadow"],
        ["-device", r#"{"driver":"virtio-net-pci","romfile":"/etc/shadow"}"#],
        ["-device", "vfio-pci,host=01:00.0"],
        ["-device", "usb-host,hostbus=1"],
        ["-device", "loader,file=shadow,addr=0"],
        ["-device", "vhost-vsock-pci,guest-cid=3"],
        ["-device", "virtio-net-pci,vhostfd=3"],
        ["-global", "virtio-net-pci.romfile=/etc/shadow"],
        ["-global", "driver=virtio-net-pci,property=romfile,value=/etc/shadow"],
        ["-set", "device.card.romfile=/etc/shadow"],
        ["-object", "memory-backend-file,id=m,mem-path=/etc/shadow,size=1M,share=on"],
        ["-object", "rng-random,id=r,filename=/dev/sda"],
        ["-object", "rng-egd,id=r,chardev=c"],
        ["-object", "secret,id=s,file=/etc/shadow"],
        ["-plugin", "/tmp/x.so"],
        ["-fsdev", "local,id=f,path=/,security_model=none"],
        ["-incoming", "exec:id"],
        ["-machine", "pc-q35-7.2,dumpdtb=/etc/x"],
        ["-machine", "pc-q35-7.2,firmware=/etc/shadow"],
        ["-machine", "xenpv"],
        ["-audiodev", "wav,id=a,path=/etc/cron.d/x"],
        ["-tpmdev", "passthrough,id=t,path=/dev/tpm0"],
        ["-D", "/etc/cron.d/x"],
        ["-pidfile", "/etc/cron.d/x"],
        ["-usbdevice", "host:1.2"],
        ["-drive", "file=nbd:localhost:10809"],
        ["-drive", "file=fat:rw:/etc"],
        ["-drive", "driver=vvfat,file.driver=vvfat,dir=/etc"],
        ["-drive", r#"file=json:{"driver":"vvfat"}"#],
        ["-blockdev", r#"{"driver":"ssh","server":{"host":"h","port":"22"},"path":"/x"}"#],
        ["-blockdev", r#"{"driver":"raw","node-name":"a","file":{"driver":"nvme","device":"0000:01:00.0"}}"#],
        ["-blockdev", "driver=vvfat,dir=/etc,node-name=a"],
        ["-blockdev", "node-name=a"],
        ["-drive", "file=/i/x,file.locking=off"],
        ["-drive", r#"{"a":"b,driver=nbd,host=10.0.0.1,c=d"}"#],
        ["-drive", "file=/i/x,format=vmdk"],
        ["-blockdev", "driver=vmdk,file=a,node-name=b"],
        ["-icount", "shift=auto,rr=record,rrfile=/etc/cron.d/x"],
        ["-icount", "shift=auto,rr=record,rrfile=x"],
        ["-device", "scsi-generic,drive=d"],
        ["-device", "virtio-vga-gl"],
        ["-device", "virtio-gpu-rutabaga-pci,wayland=x"],
        ["-device", "hyperv-syndbg,host_port=1"],
        ["-global", "vfio-pci.host=01:00.0,driver=VGA,property=a,value=b"],
        ["-global", "driver=vfio-pci,driver=VGA,property=host,value=b"],
        ["-global", r#"{"driver":"VGA","property":"a","value":"b"}"#],
        ["-readconfig", "/etc/x"],
        ["-virtfs", "local,path=/,mount_tag=x,security_model=none"],
        ["-loadvm", "x"],
        ["-add-fd", "fd=3,set=1"],
        ["-gdb", "tcp::1"],
        ["-vnc", ":1"],
        ["-drive", "file=fd:3"],
        ["-kernel", "nbd://10.0.0.1/x"],
        ["-frobnicate", "x"],
    ] {
        let found = access(&arguments);
        let names =
            |access: &HostAccess| matches!(access, HostAccess::Argument { text, .. } if text.starts_with(arguments[0]));
        assert!(found.iter().any(names), "{arguments:?}: {found:?}");
    }
}

#[test]
fn each_file_is_reported() {
    for (arguments, paths) in [
        (["-kernel", "/etc/shadow"], &["/etc/shadow"][..]),
        (["-drive", "file=/proc/self/fd/3"], &["/proc/self/fd/3"]),
        (["-drive", "file=/dev/fdset/1"], &["/dev/fdset/1"]),
        (["-initrd", "/i/a,/etc/shadow"], &["/i/a,/etc/shadow"]),
        (["-bios", "/etc/shadow"], &["/etc/shadow"]),
        (["-drive", "file=/dev/sda,format=raw,if=virtio"], &["/dev/sda"]),
        (["-drive", "file=/a,,b,file=/c"], &["/a,b", "/c"]),
        (["-fw_cfg", "opt/x,file=/etc/shadow"], &["/etc/shadow"]),
        (["-smbios", "type=11,path=/etc/shadow"], &["/etc/shadow"]),
        (["-smbios", "file=/etc/shadow"], &["/etc/shadow"]),
        (["-acpitable", "data=/etc/shadow:/etc/passwd"], &["/etc/shadow", "/etc/passwd"]),
        (["-boot", "splash=/etc/shadow"], &["/etc/shadow"]),
        (["-blockdev", r#"{"driver":"file","filename":"/etc/shadow","node-name":"a"}"#], &["/etc/shadow"]),
        (
            [
                "-blockdev",
                r#"{"driver":"qcow2","file":{"driver":"file","filename":"/a"},"backing":{"driver":"raw","file":{"driver":"host_device","filename":"/dev/sda"}}}"#,
            ],
            &["/dev/sda", "/a"],
        ),
    ] {
        let found = access(&arguments);
        let path = |access: &HostAccess| match access {
            HostAccess::File { path, .. } => path.to_string_lossy().into_owned(),
            HostAccess::Argument { text, .. } => format!("argument {text}"),
        };
        let found: Vec<_> = found.iter().map(path).collect();
        assert!(paths.iter().all(|path| found.contains(&(*path).to_owned())), "{arguments:?}: {found:?}");
        assert_eq!(found.len(), paths.len(), "{arguments:?}: {found:?}");
    }
}

#[test]
fn networks_and_fields_outside_of_the_command_line_are_checked() {
    let network = |options: &str| ForeignNetwork {
        id: "n".into(),
        kind: "user".into(),
        options: Some(options.into()),
        needs_tap: false,
        queues: 1,
        mac: String::new(),
        forwards: Vec::new(),
    };
    let found = |options: &str| {
        of_foreign(&Hardware::bare(1 << 20), &ForeignMachine { networks: vec![network(options)], ..machine(&[]) }).len()
    };
    assert_eq!(found("user,id=n,net=10.1.0.0/24"), 0);
    assert_eq!(found(r#"{"type":"user","id":"n"}"#), 0);
    for hostile in ["user,id=n,guestfwd=tcp:1.2.3.4:1-cmd:id", "user,id=n,smb=/", "user,id=n,tftp=/etc", "tap,id=n"] {
        assert_eq!(found(hostile), 1, "{hostile}");
    }
    let with_net = |backend: NetBackend| {
        let nets = vec![Net { id: "n".into(), mac: String::new(), backend }];
        of_foreign(&Hardware { nets, ..Hardware::bare(1 << 20) }, &machine(&[])).len()
    };
    let tap =
        |netns: &str| NetBackend::Tap(Tap { ifname: "t0".into(), netns: Some(netns.into()), queues: 1, vhost: false });
    assert_eq!((with_net(tap("blue")), with_net(tap("../../proc/1/ns/net"))), (0, 1));
    let rule = |text: &str| NetBackend::User(vec![text.into()]);
    assert_eq!((with_net(rule("tcp:127.0.0.1:2222-:22")), with_net(rule("unix:/run/x-:22"))), (0, 1));
    assert_eq!(with_net(tap("-blue")), 1);
    let extra = Hardware { extra: vec!["-S".into()], ..Hardware::bare(1 << 20) };
    assert_eq!(of_foreign(&extra, &machine(&[])).len(), 1);
}
