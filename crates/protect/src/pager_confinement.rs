//! What a pager may use while it reads a store, and what its broker does for it.

use crate::fill::Fill;
use rekindle_kernel::confinement::broker::Broker;
use rekindle_kernel::confinement::{Access, Calls, CapabilitySet, Confinement, ConfinementError, Grant};
use rekindle_memory::missing::Registration;
use rekindle_store::StoreUrl;
use rekindle_vm::disks;
use rekindle_vm::rundir::RunDir;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The broker's operations.
const CLOSE: u64 = 0;
const NOTIFY_FILLED: u64 = 1;

/// Files that name resolution and TLS read.
const NETWORK_FILES: &[&str] = &[
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];
const RESOLVER: &str = "/etc/resolv.conf";

/// Does what a confined pager cannot do.
#[derive(Debug)]
pub(crate) struct PagerBroker(Broker);

impl PagerBroker {
    /// Starts the broker, for the memory of `registration`.
    pub(crate) fn start(registration: Option<Registration>, rundir: RunDir) -> Result<Self, ConfinementError> {
        let answer = move |[operation]: [u64; 1]| match operation {
            CLOSE => registration.map_or(Ok(()), Registration::close).map(|()| 0).map_err(io::Error::other),
            NOTIFY_FILLED => {
                disks::notify_filled(&rundir);
                Ok(0)
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        };
        Ok(Self(Broker::start(1, CapabilitySet::SYS_PTRACE, answer)?))
    }

    /// Closes the userfaultfd in QEMU.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.0.ask([CLOSE]).map(drop)
    }

    /// Notifies the servers of the VM's disks that all memory is loaded.
    pub(crate) fn notify_filled(&self) {
        if let Err(e) = self.0.ask([NOTIFY_FILLED]) {
            tracing::debug!("disk servers still check for missing pages: {e}");
        }
    }
}

/// Returns the confinement of the pager of `fill`.
pub(crate) fn confinement(rundir: &RunDir, fill: &Fill) -> Confinement {
    let mut files = vec![Grant::new(rundir.path(), Access::Directory)];
    let mut calls = Calls::FILES | Calls::USERFAULTFD;
    let mut read = |path: &Path| files.push(Grant::new(path, Access::Read));
    if let StoreUrl::Directory(directory) = &fill.store {
        read(directory);
    } else {
        calls |= Calls::NETWORK;
        NETWORK_FILES.iter().map(Path::new).for_each(&mut read);
        let variables = env::vars_os().filter(|(name, _)| {
            name.to_str().is_some_and(|name| name.starts_with("AWS_") || name.starts_with("SSL_CERT_"))
        });
        let named_files = variables.map(|(_, value)| PathBuf::from(value)).filter(|path| path.is_absolute());
        named_files.chain(fill.connection_files()).for_each(|path| read(&path));
        resolver_files().iter().for_each(|path| read(path));
    }
    Confinement { files, calls }
}

/// Returns the resolver's configuration. Programs that change it replace the file, so its directory is granted if the
/// file is a link to a directory of such a program.
fn resolver_files() -> Vec<PathBuf> {
    let target = fs::canonicalize(RESOLVER).unwrap_or_else(|_| RESOLVER.into());
    match target.parent() {
        Some(directory) if directory.starts_with("/run") && directory != Path::new("/run") => {
            vec![directory.to_owned()]
        }
        _ => vec![target],
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_testing::hostile::{Attempt, Outcome, run};
    use serde_json::json;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    fn fill(store: &str) -> Fill {
        let vmm = json!({"binary": "/qemu", "pid": 1, "started": 1, "directory": "/vmm-1"});
        serde_json::from_value(json!({"format": 1, "store": store, "number": 1, "vmm": vmm, "blocks": []})).unwrap()
    }

    #[test]
    fn a_hostile_pager_reaches_its_own_vm_and_store_only() {
        let root = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| RunDir::new(root.path(), name));
        let store = |name: &str| root.path().join(format!("store-{name}"));
        for (rundir, name) in [(&own, "own"), (&other, "other")] {
            fs::create_dir(rundir.path()).unwrap();
            fs::create_dir(store(name)).unwrap();
            fs::write(rundir.file("state.json"), "{}").unwrap();
            fs::write(store(name).join("superblock"), "x").unwrap();
        }
        let qmp = other.file("qmp.sock");
        let _qmp = UnixListener::bind(&qmp).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other_qemu = Command::new("sleep").arg("1000").spawn().unwrap();
        let confined = |attempt: &Attempt, store: &str| {
            let fill = fill(store);
            run(attempt, || confinement(&own, &fill).enter().unwrap())
        };
        let directory = store("own").display().to_string();
        for (is_denied_with_network, attempt) in [
            (true, Attempt::Read(store("other").join("superblock"))),
            (true, Attempt::Read(other.file("state.json"))),
            (true, Attempt::Read("/etc/shadow".into())),
            (true, Attempt::Write("/proc/sys/vm/overcommit_memory".into())),
            (true, Attempt::ConnectUnix(qmp)),
            (false, Attempt::ConnectTcp(tcp.local_addr().unwrap())),
            (true, Attempt::StartProgram("/bin/true".into())),
            (true, Attempt::Fork),
            (true, Attempt::Trace(other_qemu.id())),
            (true, Attempt::Signal(other_qemu.id())),
            (true, Attempt::Mount(own.path().into())),
            (true, Attempt::Ring),
        ] {
            assert_ne!(confined(&attempt, &directory), Outcome::Done, "{attempt:?}, confined");
            let with_network = confined(&attempt, "s3://bucket/prefix");
            assert_eq!(with_network != Outcome::Done, is_denied_with_network, "{attempt:?}: {with_network:?}");
            assert_eq!(run(&attempt, || ()), Outcome::Done, "{attempt:?}, not confined");
        }
        other_qemu.kill().unwrap();
        other_qemu.wait().unwrap();
        let own_superblock = store("own").join("superblock");
        assert_eq!(confined(&Attempt::Read(own_superblock.clone()), &directory), Outcome::Done);
        assert_ne!(
            confined(&Attempt::Write(own_superblock), &directory),
            Outcome::Done,
            "a pager only reads its store"
        );
        assert_eq!(confined(&Attempt::Create(own.file("fill.json.new")), &directory), Outcome::Done);
    }
}
