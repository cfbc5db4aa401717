//! `rekindle move` with the real ssh, and a key that may only run `rekindle receive` on the destination host
//! (`docs/move.md`).

use super::{Pair, last, wait_filled};
use crate::common::device::run;
use crate::common::{CommandResult, Lab};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory that sshd needs as root.
const SSHD_DIRECTORY: &str = "/run/sshd";

/// The destination host's ssh server, which has no port: each connection starts it.
struct SshServer<'a> {
    lab: &'a Lab,
    public_key: String,
}

impl<'a> SshServer<'a> {
    /// Replaces the script in place of `ssh` in `lab` with the real one, and creates its keys.
    fn new(lab: &'a Lab) -> Self {
        fs::create_dir_all(SSHD_DIRECTORY).unwrap();
        let file = |name: &str| lab.path(name).to_str().unwrap().to_owned();
        let [host_key, key, config, authorized] = ["host-key", "key", "sshd_config", "authorized"].map(file);
        for key in [&host_key, &key] {
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", key]);
        }
        let settings = format!(
            "HostKey {host_key}\nAuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
        );
        fs::write(&config, settings).unwrap();
        let client = format!(
            "#!/bin/sh\nexec ssh -F none -q -i {key} -o IdentitiesOnly=yes -o BatchMode=yes -o StrictHostKeyChecking=no \
             -o UserKnownHostsFile=/dev/null -o ProxyCommand='/usr/sbin/sshd -i -f {config}' \"$@\"\n"
        );
        write_script(&lab.path("ssh"), &client);
        let public_key = fs::read_to_string(format!("{key}.pub")).unwrap();
        Self { lab, public_key }
    }

    /// Lets the key in with these options of `authorized_keys`.
    fn authorize(&self, options: &str) {
        fs::write(self.lab.path("authorized"), format!("{options} {}", self.public_key)).unwrap();
    }

    /// Lets the key in only for `rekindle receive`.
    fn authorize_receive(&self) {
        let receive = self.lab.path("receive");
        let text = format!(
            "#!/bin/sh\nREKINDLE_RUN_DIR={:?} REKINDLE_HOST_CONFIG={:?} exec {:?} receive\n",
            self.lab.run_root(),
            self.lab.path(".host.toml"),
            env!("CARGO_BIN_EXE_rekindle")
        );
        write_script(&receive, &text);
        self.authorize(&format!("restrict,command=\"{}\"", receive.display()));
    }

    /// Runs `ssh` with these arguments.
    fn ssh(&self, arguments: &[&str]) -> CommandResult {
        let mut command = Command::new(self.lab.path("ssh"));
        command.args(arguments).stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        self.lab.finish(command)
    }
}

fn write_script(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_guest_moves_with_a_key_that_may_only_receive_guests() {
    let pair = Pair::new("forced");
    let guest = pair.boot();
    guest.touch("16M");
    let boot = guest.boot_id();
    let server = SshServer::new(&pair.there);
    let mark = pair.there.path("mark");
    let touch = format!("touch {}", mark.display());
    server.authorize("");
    server.ssh(&["b", &touch]).ok();
    assert!(mark.exists(), "a key without options may run any command");
    fs::remove_file(&mark).unwrap();

    server.authorize_receive();
    server.ssh(&["b", &touch]);
    assert!(!mark.exists());
    // No connection to other servers through the host either.
    server.ssh(&["-W", "127.0.0.1:22", "b"]).status(255);
    last(&pair.run(&pair.here, &pair.there, &[]).ok());
    let moved = pair.guest(&pair.there);
    moved.wait_ready();
    assert_eq!(moved.boot_id(), boot);
    wait_filled(&moved);
    moved.verify();
    moved.assert_sound();
}

/// The environment of the other host has no variables of the object store: both hosts have a file with them.
#[test]
fn a_guest_moves_through_an_object_store() {
    let objects = ObjectStoreServer::start();
    let pair = Pair { store: PathBuf::from(format!("s3://{BUCKET}/far")), ..Pair::new("far") };
    let file = pair.here.write_environment_file(&objects);
    let credentials = ["--environment-file", file.as_str()];
    pair.here.rekindle([&["store", "init", pair.store.to_str().unwrap()], &credentials[..]].concat()).ok();
    let guest = pair.boot();
    guest.touch("24M");
    let (boot, tick) = (guest.boot_id(), guest.tick());
    SshServer::new(&pair.there).authorize_receive();
    let moved = last(&pair.run(&pair.here, &pair.there, &credentials).ok());
    assert_eq!(moved["there"]["prepared"], true, "{moved}");
    pair.assert_moved(&pair.here, &pair.there, &boot, tick);
    let verify = [&["--json", "store", "verify", pair.store.to_str().unwrap()], &credentials[..]].concat();
    assert_eq!(pair.there.rekindle(verify).ok().json()["bad"], serde_json::json!([]));
}
