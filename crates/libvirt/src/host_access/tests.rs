//! Domains that only describe a guest, and domains that reach the host.

use super::*;

const DOMAIN: &str = "<domain type='kvm'><name>db</name><uuid>1-2</uuid><memory unit='KiB'>1</memory>
    <metadata><x:info xmlns:x='http://x'>/y</x:info></metadata>
    <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><loader readonly='yes' type='pflash'>/usr/share/OVMF/C.fd</loader>
      <nvram template='/usr/share/OVMF/V.fd'>/var/lib/libvirt/qemu/nvram/db.fd</nvram><boot dev='hd'/></os>
    <features><acpi/></features><cpu mode='host-model'/><clock offset='utc'><timer name='rtc'/></clock>
    <on_poweroff>destroy</on_poweroff>
    <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
      <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/i/top' index='2'/>
        <backingStore type='file'><format type='raw'/><source file='/i/below'/><backingStore/></backingStore>
        <target dev='vda' bus='virtio'/></disk>
      <disk type='block' device='disk'><source dev='/dev/vg/db'/><target dev='vdb'/></disk>
      <disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
      <controller type='usb' index='0' model='qemu-xhci'/>
      <interface type='network'><mac address='52:54:00:00:00:01'/><source network='default' bridge='virbr0'/>
        <target dev='vnet0'/><model type='virtio'/></interface>
      <serial type='pty'><source path='/dev/pts/3'/><target type='isa-serial' port='0'/></serial>
      <console type='pty' tty='/dev/pts/3'><source path='/dev/pts/3'/></console>
      <channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/target/d/a.0'/>
        <target type='virtio' name='org.qemu.guest_agent.0'/></channel>
      <input type='tablet' bus='usb'/><graphics type='vnc' port='-1' autoport='yes' listen='127.0.0.1'/>
      <audio id='1' type='none'/><video><model type='vga'/></video><memballoon model='virtio'/>
      <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng><!--devices--></devices>
    <seclabel type='dynamic' model='dac' relabel='yes'/></domain>";

#[test]
fn a_usual_domain_uses_files_and_nothing_else() {
    let uses = of_domain(DOMAIN).unwrap();
    assert_eq!(uses.elements, []);
    assert_eq!((uses.uuid.as_str(), uses.emulator), ("1-2", Some("/usr/bin/qemu-system-x86_64".into())));
    let files: Vec<_> = uses.files.iter().map(|file| (file.element.as_str(), file.path.to_str().unwrap())).collect();
    let expected = [
        ("loader", "/usr/share/OVMF/C.fd"),
        ("nvram", "/var/lib/libvirt/qemu/nvram/db.fd"),
        ("nvram", "/usr/share/OVMF/V.fd"),
        ("disk", "/i/top"),
        ("disk", "/i/below"),
        ("disk", "/dev/vg/db"),
    ];
    assert_eq!(files, expected);
}

#[test]
fn each_element_that_may_reach_the_host_is_named() {
    let device = |text: &str| DOMAIN.replace("<!--devices-->", text);
    let top = |text: &str| DOMAIN.replace("<features>", &format!("{text}<features>"));
    let qemu =
        "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><q:arg value='-S'/></q:commandline>";
    for (xml, name) in [
        (top(qemu), "q:commandline"),
        (
            DOMAIN
                .replace("<domain ", "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' ")
                .replace("<features>", "<qemu:commandline><qemu:arg value='-S'/></qemu:commandline><features>"),
            "qemu:commandline",
        ),
        (top("<commandline xmlns='http://libvirt.org/schemas/domain/qemu/1.0'/>"), "xmlns:commandline"),
        (top("<bootloader>/bin/sh</bootloader>"), "bootloader"),
        (top("<seclabel type='none'/>"), "seclabel"),
        (top("<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>"), "seclabel"),
        (top("<launchSecurity type='sev'/>"), "launchSecurity"),
        (device("<hostdev mode='subsystem' type='pci'/>"), "hostdev"),
        (device("<filesystem type='mount'><source dir='/'/><target dir='x'/></filesystem>"), "filesystem"),
        (device("<interface type='direct'><source dev='eth0' mode='bridge'/></interface>"), "interface"),
        (device("<interface type='ethernet'><script path='/tmp/x'/></interface>"), "interface"),
        (device("<interface type='bridge'><source bridge='b'/><script path='/tmp/x'/></interface>"), "interface"),
        (device("<interface type='vhostuser'><source type='unix' path='/tmp/x'/></interface>"), "interface"),
        (device("<disk type='network'><source protocol='nbd' name='x'/><target dev='vdz'/></disk>"), "disk"),
        (device("<disk type='dir'><source dir='/etc'/><target dev='vdz'/></disk>"), "disk"),
        (device("<disk type='block' device='lun'><source dev='/dev/sda'/><target dev='sdz'/></disk>"), "disk"),
        (device("<serial type='dev'><source path='/dev/ttyS0'/></serial>"), "serial"),
        (device("<serial type='tcp'><source mode='bind' host='0.0.0.0' service='1'/></serial>"), "serial"),
        (device("<rng model='virtio'><backend model='random'>/dev/sda</backend></rng>"), "rng"),
        (device("<rng model='virtio'><backend model='egd' type='unix'/></rng>"), "rng"),
        (device("<graphics type='sdl' display=':0'/>"), "graphics"),
        (device("<graphics type='vnc'><listen type='socket' socket='/etc/x'/></graphics>"), "graphics"),
        (device("<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>"), "tpm"),
        (device("<input type='passthrough'><source evdev='/dev/input/event1'/></input>"), "input"),
        (device("<audio id='2' type='file' path='/etc/x'/>"), "audio"),
        (device("<memory model='nvdimm'><source><path>/etc/shadow</path></source></memory>"), "memory"),
        (device("<shmem name='x'/>"), "shmem"),
        (device("<vsock model='virtio'/>"), "vsock"),
        (device("<smartcard mode='host'/>"), "smartcard"),
        (device("<redirdev bus='usb' type='tcp'/>"), "redirdev"),
        (device("<unknown/>"), "unknown"),
    ] {
        let elements = of_domain(&xml).unwrap().elements;
        assert!(elements.iter().any(|element| element.name == name), "{name}: {elements:?}");
    }
}

#[test]
fn files_in_unusual_places_are_reported() {
    for (text, path) in [
        ("<serial type='file'><source path='/etc/cron.d/x'/></serial>", "/etc/cron.d/x"),
        ("<serial type='pty'><log file='/etc/cron.d/x' append='on'/></serial>", "/etc/cron.d/x"),
        (
            "<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/../../x'/></channel>",
            "/run/libvirt/qemu/../../x",
        ),
    ] {
        let files = of_domain(&DOMAIN.replace("<!--devices-->", text)).unwrap().files;
        assert!(files.iter().any(|file| file.path.to_str() == Some(path)), "{files:?}");
    }
    let sysinfo = "<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/shadow'/></sysinfo><features>";
    let files = of_domain(&DOMAIN.replace("<features>", sysinfo)).unwrap().files;
    assert!(files.iter().any(|file| file.path.to_str() == Some("/etc/shadow")), "{files:?}");
    for xml in ["<domain", "<network/>", "<domain type='xen'/>", "<domain type='kvm' xmlns='x'/>"] {
        of_domain(xml).unwrap_err();
    }
}
