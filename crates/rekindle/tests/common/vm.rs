//! Definitions of VMs for tests.

use super::bridge::Bridge;
use super::guest::Guest;
use super::lab::Lab;
use rekindle_testing::micro::{self, KERNEL_OPTIONS, TWO_CPUS};
use rekindle_testing::tools::qemu_new;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The network of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// A tap in the lab's namespace.
    Tap,
    /// QEMU's own network. This port of the host is forwarded to the guest's command service.
    User(u16),
    /// No network.
    None,
}

/// A builder for the definition of a VM with the micro guest.
pub struct Vm<'a> {
    lab: &'a Lab,
    name: String,
    subnet: u32,
    memory: String,
    append: String,
    keys: String,
    sections: String,
    net: Net,
    net_keys: String,
    bridge: Option<String>,
    debian: bool,
    leaky: bool,
}

impl<'a> Vm<'a> {
    pub(super) fn new(lab: &'a Lab, name: &str) -> Self {
        Self {
            lab,
            name: name.into(),
            subnet: lab.next_subnet(),
            memory: "128M".into(),
            append: String::new(),
            keys: String::new(),
            sections: String::new(),
            net: Net::Tap,
            net_keys: String::new(),
            bridge: None,
            debian: false,
            leaky: false,
        }
    }

    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.into();
        self
    }

    /// Uses the Debian guest with a read-only disk: changes stay in the guest's memory, and many VMs can share the
    /// disk.
    pub fn debian(self) -> Self {
        let [_, _, disk, _] = self.lab.debian();
        self.debian_of("root=/dev/vda ro rekindle.overlay=50%", &format!("path = {disk:?}\nreadonly = true\n"))
    }

    /// Uses the Debian guest with the kernel command line `append` and the disk section `disk`.
    pub fn debian_of(mut self, append: &str, disk: &str) -> Self {
        self.debian = true;
        self.memory("512M").append(append).section(&format!("[[disk]]\n{disk}"))
    }

    /// Uses the micro guest whose kernel can leak memory.
    pub fn leaky(mut self) -> Self {
        self.leaky = true;
        self
    }

    /// Appends to the guest's kernel command line.
    pub fn append(mut self, text: &str) -> Self {
        self.append += &format!(" {text}");
        self
    }

    /// Adds a line to the definition, above the sections.
    pub fn key(mut self, line: &str) -> Self {
        self.keys += &format!("{line}\n");
        self
    }

    /// Adds a section to the definition.
    pub fn section(mut self, text: &str) -> Self {
        self.sections += &format!("{text}\n");
        self
    }

    pub fn net(mut self, net: Net) -> Self {
        self.net = net;
        self
    }

    /// Adds a line to the section of the VM's network.
    pub fn net_key(mut self, line: &str) -> Self {
        self.net_keys += &format!("{line}\n");
        self
    }

    /// Gives the VM two processors, and a network card with three queues, of which the guest uses two.
    pub fn queues(self) -> Self {
        self.key("vcpus = 2").append(TWO_CPUS).net_key("queues = 3")
    }

    /// Puts the VM's tap into a bridge, over which the lab reaches the guest.
    pub fn bridge(mut self, bridge: &Bridge) -> Self {
        bridge.address(&format!("10.79.{}.1/24", self.subnet));
        self.bridge = Some(bridge.name.clone());
        self
    }

    fn text(&self) -> String {
        let Self { name, subnet, memory, append, keys, sections, net_keys, .. } = self;
        let (kernel, initrd) = if self.debian {
            let [kernel, initrd, ..] = self.lab.debian();
            (kernel, initrd)
        } else if self.leaky {
            self.lab.leaky()
        } else {
            self.lab.image()
        };
        let address = match self.net {
            Net::Tap => format!(" rekindle.ip=10.79.{subnet}.2/24"),
            Net::User(_) | Net::None => String::new(),
        };
        let net = match (self.net, &self.bridge) {
            (Net::Tap, Some(bridge)) => format!("[[net]]\nkind = \"tap\"\nbridge = \"{bridge}\"\n"),
            (Net::Tap, None) => {
                let namespace = &self.lab.namespace;
                format!("[[net]]\nkind = \"tap\"\nnetns = \"{namespace}\"\naddress = \"10.79.{subnet}.1/24\"\n")
            }
            (Net::User(port), _) => format!("[[net]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]\n"),
            (Net::None, _) => String::new(),
        };
        let save_dir =
            if keys.contains("save_dir") { String::new() } else { format!("save_dir = {:?}\n", self.lab.save_dir()) };
        let qemu = if keys.contains("qemu = ") { String::new() } else { format!("qemu = {:?}\n", qemu_new()) };
        format!(
            "name = \"{name}\"\nmemory = \"{memory}\"\n{qemu}{save_dir}{keys}\n[boot]\nkernel = {kernel:?}\ninitrd = {initrd:?}\n\
             append = \"{KERNEL_OPTIONS} rekindle.tick=20{address}{append}\"\n\n{net}{net_keys}\n{sections}"
        )
    }

    /// Writes the definition and returns its path.
    pub fn write(&self) -> PathBuf {
        let path = self.lab.path(&format!("{}.toml", self.name));
        fs::write(&path, self.text()).expect("a definition can be written");
        path
    }

    /// Returns the guest, which need not be running.
    pub fn guest(&self) -> Guest<'a> {
        let (namespace, address) = match self.net {
            Net::Tap => {
                let subnet = u8::try_from(self.subnet).expect("few VMs");
                (Some(self.lab.namespace.clone()), IpAddr::from(Ipv4Addr::new(10, 79, subnet, 2)))
            }
            Net::User(_) | Net::None => (None, Ipv4Addr::LOCALHOST.into()),
        };
        let port = if let Net::User(port) = self.net { port } else { micro::PORT };
        Guest::new(self.lab, &self.name, namespace, SocketAddr::new(address, port))
    }

    /// Writes the definition and starts the VM with additional arguments for `rekindle run`; does not wait for the
    /// guest.
    #[track_caller]
    pub fn start(self, arguments: &[&str]) -> Guest<'a> {
        let path = self.write();
        let words = ["run", path.to_str().expect("text")].into_iter().chain(arguments.iter().copied());
        self.lab.rekindle(words).ok();
        self.guest()
    }

    /// Starts the VM as [`Vm::start`] does and waits until the guest is up.
    #[track_caller]
    pub fn boot(self, arguments: &[&str]) -> Guest<'a> {
        let guest = self.start(arguments);
        guest.wait_ready();
        guest
    }
}
