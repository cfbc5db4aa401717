//! An object store for one test: a real Ceph with one monitor, one manager, one storage daemon in memory and an S3 gateway, from
//! Debian's packages. It ends with the test.

use crate::micro::free_port;
use crate::{DEADLINE, poll, wait_for};
use rekindle_kernel::spawn::die_with_starter;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// The bucket that exists.
pub const BUCKET: &str = "checkpoints";
const ACCESS_KEY: &str = "test-access-key";
const SECRET_KEY: &str = "test-secret-key";
const REGION: &str = "default";
/// Bytes that the storage daemon can hold in memory, which it takes as needed. The stores of 30 guests take half of it.
const CAPACITY: u64 = 5 << 30;
/// Time after which the bytes of removed objects are released, in s. By default hours: the memory would become full.
const REMOVAL_DELAY_S: u32 = 5;

const GATEWAY: &[&str] = &["-n", "client.rgw"];

/// Where the gateway listens.
#[derive(Debug, Clone)]
pub struct Listener {
    /// An address of this machine.
    pub address: Ipv4Addr,
    /// Files for `https`. Without them, the gateway uses `http`.
    pub tls: Option<TlsFiles>,
}

impl Default for Listener {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, tls: None }
    }
}

/// PEM files of the gateway.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The gateway's certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that has signed the certificate.
    pub authority: PathBuf,
}

/// A running Ceph with an S3 gateway.
pub struct ObjectStoreServer {
    directory: TempDir,
    listener: Listener,
    port: u16,
    monitor: Child,
    manager: Child,
    storage: Child,
    gateway: Child,
}

fn configuration(directory: &Path, monitor: &str, listener: &Listener, gateway_port: u16, id: &str) -> String {
    let directory = directory.display();
    let gateway_address = format!("{}:{gateway_port}", listener.address);
    let endpoint = match &listener.tls {
        None => format!("endpoint={gateway_address}"),
        Some(TlsFiles { certificate, key, .. }) => format!(
            "ssl_endpoint={gateway_address} ssl_certificate={} ssl_private_key={}",
            certificate.display(),
            key.display()
        ),
    };
    format!(
        "[global]
fsid = {id}
mon host = {monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 4
mon allow pool size one = true
run dir = {directory}
log file = {directory}/$name.log
admin socket = {directory}/$name.asok
ms bind ipv4 = true
public addr = 127.0.0.1
osd objectstore = memstore
memstore device bytes = {CAPACITY}
osd max object name len = 256
[mon.a]
mon data = {directory}/monitor
# By default, a monitor ends if less than 5 % of its file system is free, however large that is.
mon data avail crit = 0
mon data avail warn = 0
[mgr.x]
mgr data = {directory}/manager
[osd.0]
osd data = {directory}/storage
[client.rgw]
rgw frontends = beast {endpoint} tcp_nodelay=1
keyring = {directory}/keyring
rgw gc obj min wait = {REMOVAL_DELAY_S}
rgw gc processor period = {REMOVAL_DELAY_S}
rgw gc processor max time = {REMOVAL_DELAY_S}
"
    )
}

/// Runs a command, which must succeed. Returns its output.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}; run: scripts/setup"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn program(directory: &Path, name: &str) -> Command {
    let mut command = Command::new(name);
    command.arg("--conf").arg(directory.join("ceph.conf")).stdin(Stdio::null());
    command
}

/// Runs a command of Ceph until the cluster has executed it. Returns its output.
///
/// The monitor rejects a command ("wrong fsid", EPERM) that a client sends before it has received the monitor's map, which
/// happens on a busy machine; `ceph` does not repeat it.
#[track_caller]
fn ceph(directory: &Path, arguments: &[&str]) -> String {
    let mut failure = None;
    let output = poll(DEADLINE, || {
        let mut command = program(directory, "ceph");
        let output = command.args(["--connect-timeout", "60"]).args(arguments).output();
        let output = output.unwrap_or_else(|e| panic!("{command:?}: {e}; run: scripts/setup"));
        let success = output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        failure = Some(output);
        success
    });
    output.unwrap_or_else(|| panic!("ceph {arguments:?}: {failure:?}\n{}", logs(directory)))
}

/// Returns the last lines that each daemon has written, for the message of a failed assertion.
fn logs(directory: &Path) -> String {
    let files = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let logs = files.filter(|file| file.extension().is_some_and(|suffix| suffix == "log" || suffix == "out"));
    logs.fold(String::new(), |text, log| {
        let content = fs::read(&log).unwrap_or_default();
        let content = String::from_utf8_lossy(&content);
        let lines: Vec<_> = content.lines().collect();
        text + &format!("{}:\n{}\n", log.display(), lines[lines.len().saturating_sub(10)..].join("\n"))
    })
}

/// Starts a program in the foreground, so that it is a child of the test.
#[track_caller]
fn daemon(directory: &Path, name: &str, arguments: &[&str]) -> Child {
    let log = File::create(directory.join(format!("{name}.out"))).unwrap();
    let mut command = program(directory, name);
    command.arg("-f").args(arguments).stdout(log.try_clone().unwrap()).stderr(log);
    die_with_starter(&mut command).spawn().unwrap_or_else(|e| panic!("{name}: {e}; run: scripts/setup"))
}

fn random_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}

impl ObjectStoreServer {
    /// Starts it with an empty bucket, on the loopback. Takes some seconds.
    #[must_use]
    pub fn start() -> Self {
        Self::start_at(Listener::default())
    }

    /// Starts it with an empty bucket. Takes some seconds.
    #[must_use]
    pub fn start_at(listener: Listener) -> Self {
        let directory = tempfile::Builder::new().prefix("rekindle-test-").tempdir_in("/dev/shm").unwrap();
        let path = &directory.path().to_owned();
        for folder in ["monitor", "manager", "storage"] {
            fs::create_dir(path.join(folder)).unwrap();
        }
        // Without authentication, the gateway can use only the first version of the protocol.
        let (monitor_address, port, id) = (format!("v1:127.0.0.1:{}", free_port()), free_port(), random_id());
        fs::write(path.join("ceph.conf"), configuration(path, &monitor_address, &listener, port, &id)).unwrap();
        let map = path.join("monmap").display().to_string();
        run(Command::new("monmaptool").args([
            "--create",
            "--addv",
            "a",
            &format!("[{monitor_address}]"),
            "--fsid",
            &id,
            &map,
        ]));
        run(program(path, "ceph-mon").args(["--mkfs", "-i", "a", "--monmap", &map]));
        let monitor = daemon(path, "ceph-mon", &["-i", "a"]);
        let manager = daemon(path, "ceph-mgr", &["-i", "x"]);
        let storage_id = random_id();
        ceph(path, &["osd", "new", &storage_id]);
        run(program(path, "ceph-osd").args(["-i", "0", "--mkfs", "--osd-uuid", &storage_id, "--fsid", &id]));
        let mut storage = daemon(path, "ceph-osd", &["-i", "0"]);
        wait_for("the storage daemon", DEADLINE, || {
            // It ends if the monitor rejects its first command, as in `ceph`.
            if storage.try_wait().unwrap().is_some() {
                storage = daemon(path, "ceph-osd", &["-i", "0"]);
            }
            Some(ceph(path, &["osd", "stat"])).filter(|stat| stat.contains("1 up"))
        });
        let gateway = daemon(path, "radosgw", GATEWAY);
        let server = Self { directory, listener, port, monitor, manager, storage, gateway };
        server.wait_for_gateway();
        run(program(path, "radosgw-admin")
            .args(["user", "create", "--uid=test", "--display-name=test"])
            .args([format!("--access-key={ACCESS_KEY}"), format!("--secret-key={SECRET_KEY}")]));
        let authority = server.listener.tls.iter().flat_map(|files| [Path::new("--cacert"), &files.authority]);
        run(Command::new("curl")
            .args(authority)
            .args(["--silent", "--show-error", "--fail", "--request", "PUT"])
            .args(["--aws-sigv4", &format!("aws:amz:{REGION}:s3"), "--user", &format!("{ACCESS_KEY}:{SECRET_KEY}")])
            .args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"])
            .arg(format!("{}/{BUCKET}", server.endpoint())));
        server
    }

    fn wait_for_gateway(&self) {
        let address = (self.listener.address, self.port);
        wait_for("the gateway", DEADLINE, || TcpStream::connect(address).ok());
    }

    fn endpoint(&self) -> String {
        let scheme = if self.listener.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}:{}", self.listener.address, self.port)
    }

    /// Returns the variables of the environment with which a client reaches it.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 5] {
        let connection = match &self.listener.tls {
            None => ("AWS_ALLOW_HTTP", "true".into()),
            Some(files) => ("AWS_CA_BUNDLE", files.authority.display().to_string()),
        };
        [
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY.into()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY.into()),
            ("AWS_REGION", REGION.into()),
            connection,
        ]
    }

    /// Returns the port of the gateway.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the variables of [`Self::environment`] for a client that reaches the gateway over a proxy at `port`.
    #[must_use]
    pub fn environment_over(&self, port: u16) -> Vec<(&'static str, String)> {
        let endpoint = ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
        let others = self.environment().into_iter().filter(|(name, _)| *name != endpoint.0);
        others.chain([endpoint.clone()]).collect()
    }

    /// Returns the process id of the gateway.
    #[must_use]
    pub fn gateway_pid(&self) -> u32 {
        self.gateway.id()
    }

    /// Kills the gateway, as if its host had failed.
    pub fn kill_gateway(&mut self) {
        self.gateway.kill().unwrap();
        self.gateway.wait().unwrap();
    }

    /// Starts the gateway again after [`Self::kill_gateway`], or after it was killed from outside.
    pub fn restart_gateway(&mut self) {
        self.kill_gateway();
        self.gateway = daemon(self.directory.path(), "radosgw", GATEWAY);
        self.wait_for_gateway();
    }
}

impl Drop for ObjectStoreServer {
    fn drop(&mut self) {
        for daemon in [&mut self.gateway, &mut self.storage, &mut self.manager, &mut self.monitor] {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
