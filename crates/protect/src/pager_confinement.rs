//! What a pager may use while it reads a store. [`crate::fill_files`] has what its broker does for it.

use crate::fill::Fill;
use rekindle_kernel::confinement::{Access, Calls, Confinement, Grant};
use rekindle_store::StoreUrl;
use rekindle_store::environment_file::names_file;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

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

/// Returns the confinement of the pager of `fill`.
pub(crate) fn confinement(fill: &Fill) -> Confinement {
    let mut files = Vec::new();
    let mut calls = Calls::FILES | Calls::MISSING_PAGES;
    let mut read = |path: &Path| files.push(Grant::new(path, Access::Read));
    if let StoreUrl::Directory(directory) = &fill.store {
        read(directory);
    } else {
        calls |= Calls::NETWORK;
        NETWORK_FILES.iter().map(Path::new).for_each(&mut read);
        let names_files = |name: &OsString| {
            name.to_str().is_some_and(|name| names_file(name) || name == "SSL_CERT_FILE" || name == "SSL_CERT_DIR")
        };
        // `SSL_CERT_DIR` may name several.
        let values = env::vars_os().filter(|(name, _)| names_files(name)).map(|(_, value)| value);
        let named_files = values.flat_map(|value| env::split_paths(&value).collect::<Vec<_>>());
        let named_files = named_files.filter(|path| path.is_absolute());
        named_files.chain(fill.connection_files()).for_each(|path| read(&path));
        resolver_files().iter().for_each(|path| read(path));
    }
    Confinement { files, calls, user: None }
}

/// The files and directories that a confined process may use, as they were when it was confined, and the files with secrets that
/// it has read.
#[derive(Debug, Default)]
pub(crate) struct GrantedFiles {
    opened_later: Vec<(PathBuf, FileId)>,
    read_already: Vec<(PathBuf, FileVersion)>,
}

/// Device and inode.
type FileId = (u64, u64);
/// A file, and when it was changed: seconds and nanoseconds.
pub(crate) type FileVersion = (FileId, (i64, i64));

impl GrantedFiles {
    /// Inspects the files of a confinement that is about to be entered. `secrets`: those that were read, as they were before that.
    pub(crate) fn of(confinement: &Confinement, secrets: Vec<(PathBuf, FileVersion)>) -> Self {
        let granted = confinement.files.iter().map(|grant| grant.path.clone());
        Self {
            opened_later: granted.filter_map(|path| Some((path.clone(), file_version(&path)?.0))).collect(),
            read_already: secrets,
        }
    }

    /// Returns whether another file has the path of one of them now (a renewed certificate, another mount), or a file with
    /// secrets was changed.
    pub(crate) fn is_any_replaced(&self) -> bool {
        // A missing file may be in the middle of a replacement.
        let is_other = |(path, id): &(PathBuf, FileId)| file_version(path).is_some_and(|current| current.0 != *id);
        let is_changed =
            |(path, version): &(PathBuf, FileVersion)| file_version(path).is_some_and(|current| current != *version);
        self.opened_later.iter().any(is_other) || self.read_already.iter().any(is_changed)
    }
}

/// Returns the files that exist, each with its version.
pub(crate) fn versions(paths: Vec<PathBuf>) -> Vec<(PathBuf, FileVersion)> {
    paths.into_iter().filter_map(|path| Some((path.clone(), file_version(&path)?))).collect()
}

fn file_version(path: &Path) -> Option<FileVersion> {
    let metadata = fs::metadata(path).ok()?;
    Some(((metadata.dev(), metadata.ino()), (metadata.mtime(), metadata.mtime_nsec())))
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
    use rekindle_kernel::userfault::abi;
    use rekindle_testing::hostile::{Attempt, Outcome, run};
    use rekindle_vm::rundir::RunDir;
    use serde_json::json;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    fn fill(store: &str) -> Fill {
        let vmm = json!({"binary": "/qemu", "pid": 1, "started": 1, "directory": "/vmm-1"});
        serde_json::from_value(json!({"format": 1, "store": store, "number": 1, "vmm": vmm, "blocks": []})).unwrap()
    }

    #[test]
    fn a_replaced_file_is_noticed_and_a_missing_or_changed_one_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let [file, new] = ["cert", "new"].map(|name| root.path().join(name));
        fs::write(&file, "1").unwrap();
        let files = vec![Grant::new(&file, Access::Read), Grant::new(root.path().join("none"), Access::Read)];
        let granted = GrantedFiles::of(&Confinement { files, calls: Calls::FILES, user: None }, Vec::new());
        let nothing = Confinement { files: Vec::new(), calls: Calls::FILES, user: None };
        let read = GrantedFiles::of(&nothing, versions(vec![file.clone()]));
        assert!(!read.is_any_replaced());
        fs::write(&file, "2").unwrap();
        fs::File::options().write(true).open(&file).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!granted.is_any_replaced(), "it is opened again");
        assert!(read.is_any_replaced(), "it was read");
        // The first file stays, so that the new one has another inode.
        fs::rename(&file, root.path().join("old")).unwrap();
        assert!(!granted.is_any_replaced());
        fs::write(&new, "3").unwrap();
        fs::rename(&new, &file).unwrap();
        assert!(granted.is_any_replaced());
    }

    #[test]
    fn a_hostile_pager_reaches_its_store_only() {
        let root = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| RunDir::new(root.path(), name));
        let store = |name: &str| root.path().join(format!("store-{name}"));
        for (rundir, name) in [(&own, "own"), (&other, "other")] {
            fs::create_dir(rundir.path()).unwrap();
            fs::create_dir(store(name)).unwrap();
            fs::write(rundir.file("state.json"), "{}").unwrap();
            fs::write(rundir.file("fill.json"), "{}").unwrap();
            fs::write(store(name).join("superblock"), "x").unwrap();
        }
        let qmp = other.file("qmp.sock");
        let _qmp = UnixListener::bind(&qmp).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other_qemu = Command::new("sleep").arg("1000").spawn().unwrap();
        let confined = |attempt: &Attempt, store: &str| {
            let fill = fill(store);
            run(attempt, || confinement(&fill).enter().unwrap())
        };
        let directory = store("own").display().to_string();
        for (is_denied_with_network, attempt) in [
            (true, Attempt::Read(store("other").join("superblock"))),
            (true, Attempt::Read(other.file("state.json"))),
            (true, Attempt::Read(own.file("state.json"))),
            (true, Attempt::Write(own.file("state.json"))),
            (true, Attempt::Write(own.file("fill.json"))),
            (true, Attempt::Create(own.file("operation.json"))),
            (true, Attempt::Remove(own.file("operation.json"))),
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
        // Supplying pages is allowed, registering other memory of QEMU is not.
        assert_eq!(confined(&Attempt::Request(abi::COPY), &directory), Outcome::Failed(25), "ENOTTY");
        assert_eq!(confined(&Attempt::Request(abi::REGISTER), &directory), Outcome::Killed(31), "SIGSYS");
        let own_superblock = store("own").join("superblock");
        assert_eq!(confined(&Attempt::Read(own_superblock.clone()), &directory), Outcome::Done);
        assert_ne!(
            confined(&Attempt::Write(own_superblock), &directory),
            Outcome::Done,
            "a pager only reads its store"
        );
    }
}
