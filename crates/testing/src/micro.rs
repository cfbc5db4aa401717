//! A client of the micro guest's command service, which replies to each line with a line.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Mutex;
use std::time::Duration;

/// Port of the service in the guest.
pub const PORT: u16 = 7000;
/// The file of the micro guest's kernel with which it boots soonest: a guest under TCG unpacks `vmlinuz` for most of a
/// second.
pub const KERNEL: &str = "vmlinux";
/// Kernel option with which the second processor does not run until the command `online-cpu 1`. If both run while the
/// kernel boots, QEMU's emulation fails once in about 150 boots: a timer does not fire (`rcu_preempt detected stalls`),
/// or QEMU ends with an assertion (`iotlb_to_section`).
pub(crate) const ONE_CPU: &str = "maxcpus=1";
/// Kernel options with which the second processor runs from the end of the kernel's boot on.
pub const TWO_CPUS: &str = "maxcpus=1 rekindle.online=1";
/// Kernel options of each guest. On a busy host, a kernel under TCG may panic when it checks its timer
/// (`IO-APIC + timer doesn't work`); under KVM it omits the check by itself. The kernel's tests of its ciphers
/// are a quarter of the boot's processor time under TCG.
pub const KERNEL_OPTIONS: &str = "console=ttyS0 quiet no_timer_check cryptomgr.notests";
/// Ports for tests. The kernel does not give them to connections: those have ports from 32768 on.
const TEST_PORTS: Range<u16> = 20_000..30_000;

/// Sends a command and returns the reply, which must be complete. `timeout` is the limit for each read.
pub fn exchange(stream: &TcpStream, command: &str, timeout: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(timeout))?;
    writeln!(&*stream, "{command}")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    if reply.ends_with('\n') { Ok(reply.trim_end().into()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Returns a TCP port on which no process listens, and which no other test gets until this process ends. A VM's port is
/// free for a moment whenever its QEMU is replaced.
pub fn free_port() -> u16 {
    static RESERVATIONS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    let reserve = |port| {
        // An abstract name belongs to the network namespace, as the port does, and vanishes with this process.
        let name = SocketAddr::from_abstract_name(format!("rekindle-test-port-{port}")).ok()?;
        let reservation = UnixListener::bind_addr(&name).ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        RESERVATIONS.lock().unwrap().push(reservation);
        Some(port)
    };
    TEST_PORTS.into_iter().find_map(reserve).expect("a free port")
}
