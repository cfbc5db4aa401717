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
      <channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/target/domain-1-db/agent.0'/>
        <target type='virtio' name='agent.0'/></channel>
      <input type='tablet' bus='usb'/><graphics type='vnc' port='-1' autoport='yes' listen='127.0.0.1'/>
      <audio id='1' type='none'/><video><model type='vga'/></video><memballoon model='virtio'/>
      <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng><redirdev bus='usb' type='spicevmc'/></devices>
    <seclabel type='dynamic' model='dac' relabel='yes'/></domain>";

#[test]
fn a_usual_domain_uses_files_and_nothing_else() {
    let uses = of_domain(DOMAIN).unwrap();
    assert_eq!(uses.elements, []);
    assert_eq!((uses.name.as_str(), uses.uuid.as_str()), ("db", "1-2"));
    assert_eq!(uses.emulators, [PathBuf::from("/usr/bin/qemu-system-x86_64")]);
    let formats: Vec<_> = uses.files.iter().filter_map(|file| file.format.as_deref()).collect();
    assert_eq!(formats, ["qcow2", "raw"]);
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
    let device = |text: &str| DOMAIN.replace("</devices>", &format!("{text}</devices>"));
    let top = |text: &str| DOMAIN.replace("<features>", &format!("{text}<features>"));
    for (xml, name) in [
        (
            top(
                "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><q:env name='a' value='b'/></q:commandline>",
            ),
            "q:commandline",
        ),
        (top("<q:override xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>"), "q:override"),
        (top("<commandline xmlns='http://x'/>"), "xmlns:commandline"),
        (top("<resource><partition>/system.slice</partition></resource>"), "resource"),
        (top("<cputune><vcpusched vcpus='0' scheduler='fifo' priority='99'/></cputune>"), "cputune"),
        (top("<seclabel type='dynamic' model='selinux'><baselabel>unconfined_t</baselabel></seclabel>"), "seclabel"),
        (
            DOMAIN.replace("<boot dev='hd'/>", "<nvram type='block'><source file='/i/x' dev='/dev/sda'/></nvram>"),
            "nvram",
        ),
        (device("<interface type='network'><source network='x'/><script path='x'/></interface>"), "interface"),
        (device("<interface type='user'><backend type='passt' logFile='x'/></interface>"), "interface"),
        (device("<disk type='file'><source file='/i/x'><encryption format='luks'/></source></disk>"), "disk"),
        (device("<disk type='file'><driver name='qemu' type='vmdk'/><source file='/i/x'/></disk>"), "disk"),
        (device("<tpm><backend type='emulator'><source type='dir' path='x'/></backend></tpm>"), "tpm"),
        (
            device("<tpm><backend type='emulator'/><backend type='passthrough'><device path='x'/></backend></tpm>"),
            "tpm",
        ),
        (
            device(
                "<graphics type='vnc'><listen type='socket' socket='/var/lib/libvirt/qemu/domain-1-web/vnc.sock'/></graphics>",
            ),
            "graphics",
        ),
        (device("<graphics type='spice'><listen type='socket' socket='x'/></graphics>"), "graphics"),
        (device("<video><driver name='vhostuser'/></video>"), "video"),
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
        // Relative to the directory of libvirt's daemon.
        ("<serial type='file'><source path='etc'/></serial>", "etc"),
        // The monitor, the agent and the variables of another domain.
        (
            "<serial type='unix'><source mode='connect' path='/var/lib/libvirt/qemu/domain-1-web/monitor.sock'/></serial>",
            "/var/lib/libvirt/qemu/domain-1-web/monitor.sock",
        ),
        (
            "<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/channel/1-web/agent'/><target name='agent'/></channel>",
            "/run/libvirt/qemu/channel/1-web/agent",
        ),
        (
            "<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/channel/1-db/agent'/><target name='x'/></channel>",
            "/run/libvirt/qemu/channel/1-db/agent",
        ),
        (
            "<serial type='file'><source path='/var/lib/libvirt/qemu/nvram/web_VARS.fd'/></serial>",
            "/var/lib/libvirt/qemu/nvram/web_VARS.fd",
        ),
    ] {
        let files = of_domain(&DOMAIN.replace("</devices>", &format!("{text}</devices>"))).unwrap().files;
        assert!(files.iter().any(|file| file.path.to_str() == Some(path)), "{files:?}");
    }
    let sysinfo = "<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/shadow'/></sysinfo><features>";
    let files = of_domain(&DOMAIN.replace("<features>", sysinfo)).unwrap().files;
    assert!(files.iter().any(|file| file.path.to_str() == Some("/etc/shadow")), "{files:?}");
    for xml in ["<domain", "<network/>", "<domain type='xen'/>", "<domain type='kvm' xmlns='x'/>"] {
        of_domain(xml).unwrap_err();
    }
}

#[test]
fn what_libvirt_could_read_otherwise_is_rejected() {
    let os = "<boot dev='hd'/>";
    let emulator = "<emulator>/usr/bin/qemu-system-x86_64</emulator>";
    for (part, replacement) in [
        (emulator, "<emulator>/usr/bin/qemu-system-x86_64<!---->/../x</emulator>"),
        (emulator, "<emulator>/usr/bin/qemu-system-x86_64<?x?>/../x</emulator>"),
        ("<source file='/i/top'", "<source xmlns:x='y' x:file='/etc/shadow'"),
        (os, "<nvram xmlns:x='y' x:template='/etc/shadow'/>"),
        (os, "<x:kernel xmlns:x='y'>/etc/shadow</x:kernel>"),
        ("<uuid>", "<uuid>3-4</uuid><uuid>"),
        ("<name>", "<name>web</name><name>"),
        ("<domain", "<!DOCTYPE domain [<!ENTITY e SYSTEM 'file:///etc/shadow'>]><domain"),
    ] {
        let xml = DOMAIN.replacen(part, replacement, 1);
        assert_ne!(xml, DOMAIN, "{part}");
        assert!(of_domain(&xml).is_err(), "{replacement}");
    }
    // libvirt takes the first, so each is checked.
    let two = DOMAIN.replace(emulator, &format!("<emulator>/tmp/x</emulator>{emulator}"));
    assert!(of_domain(&two).unwrap().emulators.contains(&"/tmp/x".into()));
}

#[test]
fn arguments_are_read_and_what_a_running_domain_has_in_addition_does_not_count() {
    let command_line = "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><q:arg value='-device'/>
        <q:arg value='edu'/></q:commandline><features>";
    let uses = of_domain(&DOMAIN.replace("<features>", command_line)).unwrap();
    assert_eq!((uses.arguments, uses.elements), (vec!["-device".to_owned(), "edu".to_owned()], Vec::new()));
    let content = |device: &str| {
        of_domain(&DOMAIN.replace("</devices>", &format!("{device}</devices>")))
            .unwrap()
            .elements
            .pop()
            .unwrap()
            .content
    };
    let (defined, running) =
        (content("<shmem name='x'> </shmem>"), content("<shmem name='x'><alias name='shmem0'/></shmem>"));
    assert_eq!(defined, running);
    assert_ne!(defined, content("<shmem name='y'/>"));
}
