//! Checkpoints of a guest in a real object store: Ceph's S3 gateway.

use crate::common::protector::{Protector, crash, restore, restore_with, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rekindle_testing::object_store::{BUCKET, Listener, ObjectStoreServer, TlsFiles};
use rekindle_testing::shifted_clock::{ShiftedClock, YEAR_S};
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Boots a guest without a network.
fn boot<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    let guest = lab.vm(name).net(Net::None).memory("96M").start(&[]);
    wait_for("the guest to be up", DEADLINE, || {
        fs::read_to_string(guest.file("console.log")).ok().filter(|text| text.contains("rekindle-micro ready"))
    });
    guest
}

/// Returns the last tick on the guest's console.
fn last_tick(guest: &Guest<'_>) -> Option<u64> {
    let text = fs::read_to_string(guest.file("console.log")).ok()?;
    // The lines are "tick N UPTIME".
    text.lines().rev().find_map(|line| line.strip_prefix("tick ")?.split_whitespace().next()?.parse().ok())
}

#[test]
fn a_guest_continues_from_an_object_store_also_if_the_server_failed_in_the_middle_of_a_commit() {
    let mut server = ObjectStoreServer::start();
    let variables = server.environment();
    let environment: Vec<(&str, &str)> = variables.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let lab = Lab::without_root();
    let guest = boot(&lab, "web");
    let store = PathBuf::from(format!("s3://{BUCKET}/web"));
    let mut init = lab.command(["store", "init", store.to_str().unwrap()]);
    init.envs(environment.iter().copied());
    lab.finish(init).ok();

    let mut protector = Protector::start_with(&guest, &lab, &store, &["--every", "100ms"], &environment);
    assert_eq!(protector.wait("checkpoint")["number"], 1);
    let committed = protector.next_checkpoint()["number"].as_u64().unwrap();
    // The protector commits all the time, so the server fails in a commit or just before one.
    server.kill_gateway();
    let tick = last_tick(&guest);
    wait_for("the guest to continue", DEADLINE, || (last_tick(&guest) > tick).then_some(()));
    protector.kill();
    crash(&guest);
    server.restart_gateway();

    let restored = restore_with(&guest, &store, &[], &environment);
    let number = restored["checkpoint"].as_u64().unwrap();
    assert!(number >= committed, "{restored}");
    wait_filled(&guest);
    let tick = last_tick(&guest);
    wait_for("the restored guest to run", DEADLINE, || (last_tick(&guest) > tick).then_some(()));
    guest.only_qemu();
    // The guest is protected again, into the same store.
    let mut again = Protector::start_with(&guest, &lab, &store, &["--every", "100ms"], &environment);
    assert!(again.wait("checkpoint")["number"].as_u64().unwrap() > number);
    again.end();
    let mut verify = lab.command(["--json", "store", "verify", store.to_str().unwrap()]);
    verify.envs(environment.iter().copied());
    assert_eq!(lab.finish(verify).ok().json()["bad"], serde_json::json!([]));
}

/// The resource agent has the credentials in a file. So have the protector and the pager that its commands start.
#[test]
fn a_cluster_resource_uses_an_object_store_with_the_variables_of_a_file() {
    let server = ObjectStoreServer::start();
    let lab = Lab::without_root();
    let variables = PathBuf::from(lab.write_environment_file(&server));
    fs::set_permissions(&variables, Permissions::from_mode(0o644)).unwrap();
    let vm = lab.vm("web").net(Net::None).memory("96M");
    let (definition, guest) = (vm.write(), vm.guest());
    let (store, file) = (format!("s3://{BUCKET}/web"), variables.to_str().unwrap());
    let prepared = |words: &[&str]| lab.command([words, &["--json", "--environment-file", file]].concat());
    let command = |words: &[&str]| lab.finish(prepared(words));
    let ocf_command = |action: &str| {
        let resource =
            ["--definition", definition.to_str().unwrap(), "--store", &store, "--every", "100ms", "--keep", "1000"];
        prepared(&[&["ocf", action, "web"][..], &resource].concat())
    };
    let ocf = |action: &str| lab.finish(ocf_command(action));
    command(&["store", "init", &store]).status(1).prints(&["s3.env", "chmod 600"]);
    fs::set_permissions(&variables, Permissions::from_mode(0o600)).unwrap();
    command(&["store", "init", &store]).ok();
    ocf("monitor").status(7);
    assert_eq!(ocf("start").ok().json()["started"], "booted");
    ocf("monitor").status(0);
    let newest = || command(&["store", "ls", &store]).ok().json()["checkpoints"].as_array().map_or(0, Vec::len);
    wait_for("checkpoints", DEADLINE, || (newest() >= 2).then_some(()));
    // The node fails: QEMU, protector and files are lost.
    crash(&guest);
    ocf("monitor").status(7);
    // The pager dies, and is started anew by a process that does not know the file.
    let mut start = ocf_command("start");
    start.env("REKINDLE_FAULT", "fill.end.locked:kill");
    assert_eq!(lab.finish(start).ok().json()["started"], "restored");
    wait_for("the pager to die, and a restart of it", DEADLINE, || {
        let restarts = fs::read_to_string(guest.file("helpers.json")).unwrap_or_default();
        restarts.contains("\"pager\"").then_some(())
    });
    wait_filled(&guest);
    ocf("monitor").status(0);
    guest.single_qemu();
    let configured = lab.command([
        "ocf",
        "show-config",
        "web",
        "--definition",
        definition.to_str().unwrap(),
        "--store",
        &store,
        "--environment-file",
        file,
    ]);
    lab.finish(configured).ok().prints(&[&format!("environment_file={file}")]);
    // Without the file, the guest runs, and can be stopped: a failed stop would fence the node.
    let away = lab.path("away.env");
    fs::rename(&variables, &away).unwrap();
    ocf("monitor").status(0);
    let stopped = ocf("stop").ok().json();
    assert!(stopped["lost"].is_string(), "{stopped}");
    ocf("monitor").status(7);
    ocf("start").status(1).prints(&["there is no environment file", "s3.env"]);
    command(&["store", "ls", &store]).status(1).prints(&["s3.env"]);
    fs::rename(&away, &variables).unwrap();
    assert_eq!(ocf("start").ok().json()["started"], "restored");
    wait_filled(&guest);
    ocf("stop").ok();
    ocf("monitor").status(7);
}

#[test]
fn a_guest_blocks_while_its_object_store_is_unavailable() {
    let (lab, mut server) = (Lab::new(), ObjectStoreServer::start());
    let file = lab.write_environment_file(&server);
    let credentials = ["--environment-file", file.as_str()];
    let store = PathBuf::from(format!("s3://{BUCKET}/gone"));
    let guest = lab.vm("gone").memory("384M").boot(&[]);
    guest.touch("256M");
    let boot = guest.boot_id();
    let protect = [&["--create-store", "--every", "100ms", "--count", "1"], &credentials[..]].concat();
    let mut protector = Protector::start(&guest, &lab, &store, &protect);
    assert!(protector.child.wait().unwrap().success());
    let mut waited = false;
    for _ in 0..5 {
        crash(&guest);
        restore(&guest, &store, &credentials);
        server.kill_gateway();
        // The fill may have finished already. Then the next round tries again.
        waited = guest.file("fill.json").exists();
        if waited {
            let log = guest.file("pager.log");
            let is_logged = || {
                let text = fs::read_to_string(&log).unwrap_or_default();
                text.contains("the guest blocks where it needs it").then_some(())
            };
            wait_for("the pager to log that it waits", DEADLINE, is_logged);
            assert!(guest.file("fill.json").exists(), "the fill ended without the store");
        }
        server.restart_gateway();
        guest.verify();
        assert_eq!(guest.boot_id(), boot);
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
        if waited {
            break;
        }
    }
    assert!(waited, "each fill finished before the store was unavailable");
}

#[test]
fn a_guest_is_restored_from_an_object_store_into_another_run_directory() {
    let (lab, server) = (Lab::new(), ObjectStoreServer::start());
    let file = lab.write_environment_file(&server);
    let credentials = ["--environment-file", file.as_str()];
    let store = format!("s3://{BUCKET}/far");
    let guest = lab.vm("far").memory("192M").boot(&[]);
    guest.touch("64M");
    let boot = guest.boot_id();
    let protect = [&["--create-store", "--every", "100ms", "--count", "2"], &credentials[..]].concat();
    let mut protector = Protector::start(&guest, &lab, Path::new(&store), &protect);
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    // Restore with another run directory, RAM directory and journal, as on another host.
    let elsewhere = lab.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let mut restore = lab.command([&["--json", "restore", "far", "--store", &store], &credentials[..]].concat());
    restore.env("REKINDLE_RUN_DIR", &elsewhere);
    assert_eq!(lab.finish(restore).ok().json()["checkpoint"], 2);
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    let fill = elsewhere.join("far/fill.json");
    wait_for("the fill to finish", DEADLINE, || (!fill.exists()).then_some(()));
    guest.verify();
    let mut stop = lab.command(["stop", "far", "--now"]);
    stop.env("REKINDLE_RUN_DIR", &elsewhere);
    lab.finish(stop).ok();
}

/// Creates an authority, and a certificate for the loopback address that is valid for `days` from now on.
fn certificates(directory: &Path, days: u64) -> TlsFiles {
    let named = |name: &str, addresses: &[&str]| {
        let mut params =
            CertificateParams::new(addresses.iter().map(|address| (*address).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    fs::create_dir(directory).unwrap();
    let files = ["gateway.pem", "gateway.key", "ca.pem"].map(|name| directory.join(name));
    let [certificate, key, authority] = files;
    let (mut params, authority_key) = (named("authority", &[]), KeyPair::generate().unwrap());
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(&authority, params.self_signed(&authority_key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, authority_key);
    let (mut params, gateway_key) = (named("gateway", &["127.0.0.1"]), KeyPair::generate().unwrap());
    params.not_after = (SystemTime::now() + Duration::from_secs(days * 86_400)).into();
    fs::write(&certificate, params.signed_by(&gateway_key, &issuer).unwrap().pem()).unwrap();
    fs::write(&key, gateway_key.serialize_pem()).unwrap();
    TlsFiles { certificate, key, authority }
}

#[test]
fn the_certificate_of_an_object_store_is_checked() {
    let (lab, clock) = (Lab::without_root(), ShiftedClock::new());
    let tls = certificates(&lab.path("tls"), 180);
    let other = certificates(&lab.path("other"), 180);
    let server = ObjectStoreServer::start_at(Listener { tls: Some(tls.clone()), ..Listener::default() });
    let store = format!("s3://{BUCKET}/web");
    let command = |action: &str, host: &str, authority: Option<&Path>| {
        let mut command = lab.command(["store", action, &store]);
        command.envs(server.environment()).env("AWS_ENDPOINT_URL", format!("https://{host}:{}", server.port()));
        match authority {
            Some(file) => command.env("AWS_CA_BUNDLE", file),
            None => command.env_remove("AWS_CA_BUNDLE"),
        };
        command
    };
    let (address, authority) = ("127.0.0.1", Some(tls.authority.as_path()));
    lab.finish(command("init", address, authority)).ok();
    lab.finish(command("ls", address, authority)).status(1).prints(&["a new store, without a VM yet"]);
    // No authority, another one, and another name than that of the certificate.
    for (host, authority) in [(address, None), (address, Some(other.authority.as_path())), ("localhost", authority)] {
        let listed = lab.finish(command("ls", host, authority)).status(1);
        let listed = listed.prints(&["the object store's certificate", "AWS_CA_BUNDLE"]);
        assert!(!listed.to_string().contains("a new store"), "{host}, {authority:?}: {listed}");
    }
    clock.set(YEAR_S);
    let mut expired = command("ls", address, authority);
    expired.envs(clock.environment());
    lab.finish(expired).status(1).prints(&["the object store's certificate", "renew it"]);
}

#[test]
fn a_request_to_an_object_store_that_never_answers_ends_after_its_timeout() {
    // A request and its repetitions, twice.
    const LIMIT: Duration = Duration::from_secs(60);
    // The kernel accepts the connections.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let lab = Lab::without_root();
    let mut list = lab.command(["store", "ls", "s3://checkpoints/web"]);
    list.env("AWS_ENDPOINT_URL", format!("http://{}", silent.local_addr().unwrap()));
    list.envs([("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "default"), ("AWS_TIMEOUT", "1s")]);
    list.envs([("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")]);
    let started = Instant::now();
    lab.finish(list).status(1).prints(&["s3://checkpoints/web"]);
    let took = started.elapsed();
    assert!((Duration::from_secs(1)..LIMIT).contains(&took), "{took:?}");
}
