//! VMs of ordinary users: all their processes run without privileges, while they are protected, replaced and restored,
//! and no process of one user can use what belongs to another.

use crate::common::served::{READ, digest, image, section};
use crate::common::{DEADLINE, Guest, Lab, free_port, wait_for};
use rekindle_kernel::access_list;
use rekindle_kernel::process::Process;
use rekindle_testing::micro::{KERNEL, KERNEL_OPTIONS};
use rekindle_testing::poll;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const USERFAULTFD: &str = "/dev/userfaultfd";
const VM: &str = "web";

/// An ordinary user with a VM. Everything of it is removed on drop.
struct Account<'a> {
    lab: &'a Lab,
    uid: u32,
    home: PathBuf,
    guest: Guest<'a>,
}

impl<'a> Account<'a> {
    fn new(lab: &'a Lab, number: u32) -> Self {
        // An unused user ID, so that the user has no other processes.
        let uid = 1_910_000_000 + std::process::id() * 2 + number;
        let home = lab.path(&format!("home{number}"));
        for directory in [home.clone(), home.join("run")] {
            fs::create_dir(&directory).unwrap();
            fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
            chown(&directory, Some(uid), Some(uid)).unwrap();
        }
        let port = free_port();
        let disk = image(lab, &format!("home{number}/disk.raw"));
        let shared = lab.path("shared");
        let definition = format!(
            "name = {VM:?}\nmemory = \"128M\"\n[boot]\nkernel = {:?}\ninitrd = {:?}\n\
             append = \"{KERNEL_OPTIONS}\"\n[[net]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]\n{}",
            shared.join(KERNEL),
            shared.join("initrd"),
            section(&disk, "")
        );
        fs::write(home.join("web.toml"), definition).unwrap();
        for file in ["disk.raw", "web.toml"] {
            chown(home.join(file), Some(uid), Some(uid)).unwrap();
        }
        let guest = Guest::at(lab, VM, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self { lab, uid, home, guest }
    }

    /// Returns a command that runs a program as this user.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={}", self.uid), format!("--regid={}", self.uid)]);
        command.args(["--clear-groups", "--"]).arg(program);
        // Directories of this test's PATH may be closed to other users.
        command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("REKINDLE_HOST_CONFIG", self.home.join("host.toml"));
        command.env("HOME", &self.home).env("XDG_RUNTIME_DIR", self.home.join("run")).current_dir(&self.home);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn rekindle_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&self.lab.path("shared/rekindle"));
        command.args(arguments);
        command
    }

    fn rekindle(&self, arguments: &[&str]) -> crate::common::CommandResult {
        self.lab.finish(self.rekindle_command(arguments))
    }

    /// Returns the path of a file in the VM's run directory.
    fn file(&self, name: &str) -> PathBuf {
        self.home.join("run/rekindle").join(VM).join(name)
    }

    fn shared_memory(&self) -> PathBuf {
        format!("/dev/shm/rekindle-{}", self.uid).into()
    }

    fn store(&self) -> String {
        self.home.join("store").to_str().unwrap().to_owned()
    }

    fn shown(&self) -> Value {
        self.rekindle(&["--json", "show", VM]).ok().json()
    }

    fn qemu(&self) -> Process {
        let pid = self.shown()["vmm"]["pid"].as_u64().expect("a QEMU");
        Process::of(u32::try_from(pid).unwrap()).unwrap()
    }

    fn start_protector(&self) -> Child {
        let store = self.store();
        let mut command = self.rekindle_command(&["protect", VM, "--store", &store, "--every", "500ms"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Returns the number of the last checkpoint that the protector has committed, or 0.
    fn newest_checkpoint(&self) -> u64 {
        let progress = fs::read_to_string(self.file("protect.json")).unwrap_or_default();
        let progress: Option<Value> = serde_json::from_str(&progress).ok();
        progress.and_then(|progress| progress["committed"].as_u64()).unwrap_or_default()
    }

    /// Waits until the store has a checkpoint of now.
    fn wait_checkpoint(&self) {
        let before = self.newest_checkpoint();
        // The next one may have been in progress already.
        wait_for("the next checkpoints", DEADLINE, || (self.newest_checkpoint() >= before + 2).then_some(()));
    }
}

impl Drop for Account<'_> {
    fn drop(&mut self) {
        let _ = self.rekindle_command(&["stop", "--now", VM]).output();
        for pid in processes() {
            if Rights::of(pid).is_some_and(|rights| rights.users.contains(&self.uid)) {
                let _ = Process::of(pid).map(|process| process.kill());
            }
        }
        let _ = fs::remove_dir_all(self.shared_memory());
        let _ = access_list::remove_user(Path::new(USERFAULTFD), self.uid);
    }
}

/// Copies what ordinary users need of this test, where they can read it.
fn share(lab: &Lab) {
    fs::set_permissions(lab.path("."), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(lab.path("shared")).unwrap();
    let (kernel, initrd) = lab.image();
    for (from, to) in [(kernel, KERNEL), (initrd, "initrd"), (env!("CARGO_BIN_EXE_rekindle").into(), "rekindle")] {
        let to = lab.path("shared").join(to);
        fs::copy(&from, &to).unwrap();
        fs::set_permissions(&to, Permissions::from_mode(0o755)).unwrap();
    }
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// What the kernel permits a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rights {
    users: Vec<u32>,
    /// Groups, with the additional ones.
    groups: Vec<u32>,
    /// Capabilities that it has or can give to a program.
    capabilities: u64,
}

impl Rights {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let numbers =
            |name| field(name)?.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<u32>>>();
        let capabilities = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
        let capabilities = capabilities.map(|name| u64::from_str_radix(field(name)?.trim(), 16).ok());
        let groups = [numbers("Gid:")?, numbers("Groups:")?].concat();
        Some(Self {
            users: numbers("Uid:")?,
            groups,
            capabilities: capabilities.into_iter().try_fold(0, |all, some| Some(all | some?))?,
        })
    }

    /// Returns whether it has the user ID and the group of one of these accounts, and nothing else.
    fn is_of(&self, accounts: &[u32]) -> bool {
        let has_all = |account: &u32| self.users.iter().chain(&self.groups).all(|id| id == account);
        accounts.iter().any(has_all) && self.capabilities == 0
    }
}

/// A process of a VM.
#[derive(Debug)]
struct Member {
    kind: String,
    /// Of each thread.
    rights: Vec<Rights>,
}

/// Finds the processes of a VM: those that have the path of its user's files in their command line, environment,
/// directory or open files, those of its user, and all in the session of one of them. `setpriv`, which starts the
/// commands of this test, is left out.
fn members(home: &Path, uid: u32) -> BTreeMap<u32, Member> {
    let mark = home.to_str().unwrap().as_bytes();
    let has_mark = |text: &[u8]| text.windows(mark.len()).any(|part| part == mark);
    let (mut found, mut sessions, mut others) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for pid in processes().into_iter().filter(|pid| *pid != std::process::id()) {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| fs::read(directory.join(name)).unwrap_or_default();
        let line = read("cmdline");
        // Empty for a process that has ended and one of the kernel. A child of the test has its arguments until its exec.
        if line.is_empty() || line.starts_with(b"setpriv\0") || line == fs::read("/proc/self/cmdline").unwrap() {
            continue;
        }
        let links = fs::read_dir(directory.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
        let has_link = links
            .chain([directory.join("cwd")])
            .any(|link| fs::read_link(link).is_ok_and(|target| has_mark(target.as_os_str().as_encoded_bytes())));
        let session = fs::read_to_string(directory.join("stat")).ok().and_then(|stat| {
            // Field 6 of proc_pid_stat(5).
            stat.rsplit(") ").next()?.split(' ').nth(3)?.parse::<u32>().ok()
        });
        let is_users = Rights::of(pid).is_some_and(|rights| rights.users.contains(&uid));
        if has_mark(&line) || has_mark(&read("environ")) || has_link || is_users {
            found.insert(pid);
            // A command of this test is in the test's session.
            sessions.extend(session.filter(|session| Some(*session) != own_session()));
        } else {
            others.push((pid, session));
        }
    }
    found.extend(
        others.iter().filter(|(_, session)| session.is_some_and(|id| sessions.contains(&id))).map(|(pid, _)| *pid),
    );
    found
        .into_iter()
        .filter_map(|pid| Some((pid, Member { kind: kind(pid)?, rights: rights_of_threads(pid) })))
        .collect()
}

fn own_session() -> Option<u32> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(3)?.parse().ok()
}

/// Returns QEMU or the command of Rekindle that a process runs.
fn kind(pid: u32) -> Option<String> {
    // A broker replaces its arguments by one text.
    let line = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " ");
    let mut words = line.split_whitespace().filter(|word| *word != "--json");
    let name = words.next()?.rsplit('/').next()?;
    Some(if name.starts_with("qemu") { "qemu".into() } else { format!("{name} {}", words.next()?) })
}

fn rights_of_threads(pid: u32) -> Vec<Rights> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    statuses.filter_map(|status| Rights::parse(&status)).collect()
}

/// Asserts that exactly these long-lived processes run for a VM, and that none of them has a privilege.
#[track_caller]
fn assert_processes(account: &Account<'_>, expected: &[&str]) {
    let mut kinds = Vec::new();
    let _ = poll(DEADLINE, || {
        let members = members(&account.home, account.uid);
        for (pid, member) in &members {
            assert!(member.rights.iter().all(|rights| rights.is_of(&[account.uid])), "process {pid}: {member:?}");
        }
        kinds = members.into_values().map(|member| member.kind).collect();
        kinds.sort();
        (kinds == expected).then_some(())
    });
    assert_eq!(kinds, expected);
}

/// A thread that checks all processes of some VMs again and again, also those that run for a moment only.
struct Census {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<(BTreeSet<String>, Vec<String>)>>,
}

impl Census {
    fn start(accounts: &[Account<'_>]) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&end);
        let accounts: Vec<_> = accounts.iter().map(|account| (account.home.clone(), account.uid)).collect();
        let thread = thread::spawn(move || {
            let (mut kinds, mut privileged) = (BTreeSet::new(), Vec::new());
            // The attempts of a user have paths of the other in their arguments.
            let users: Vec<_> = accounts.iter().map(|(_, uid)| *uid).collect();
            while !is_over.load(Ordering::Relaxed) {
                for (home, uid) in &accounts {
                    for (pid, member) in members(home, *uid) {
                        if !member.rights.iter().all(|rights| rights.is_of(&users)) {
                            privileged.push(format!("process {pid}: {member:?}"));
                        }
                        kinds.insert(member.kind);
                    }
                }
                thread::sleep(Duration::from_millis(30));
            }
            (kinds, privileged)
        });
        Self { end, thread: Some(thread) }
    }

    /// Asserts that no process had a privilege. Returns the kinds of processes that were seen.
    #[track_caller]
    fn end(mut self) -> BTreeSet<String> {
        self.end.store(true, Ordering::Relaxed);
        let (kinds, privileged) = self.thread.take().unwrap().join().unwrap();
        assert!(privileged.is_empty(), "{privileged:#?}");
        kinds
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// A program that makes attempts, each on the path or process in an argument, and prints one line for each: `ok` or the
/// error.
const ATTEMPTS: &str = r#"
import ctypes, os, socket, sys
def connect(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(path)
def read(path):
    # Unlike `open`, does not wait for the other end of a pipe.
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
def write(path):
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
def create(path):
    os.mkdir(path)
    os.rmdir(path)
def signal(pid):
    os.kill(int(pid), 0)
def trace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    # PTRACE_SEIZE
    if libc.ptrace(0x4206, int(pid), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
for argument in sys.argv[1:]:
    attempt, target = argument.split(":", 1)
    try:
        {"list": os.listdir, "connect": connect, "read": read, "write": write, "create": create, "signal": signal,
         "trace": trace}[attempt](target)
        print("ok")
    except OSError as e:
        print(os.strerror(e.errno) if e.errno else e)
"#;

/// What a user can do with its own VM, and no other user.
fn attempts_on(account: &Account<'_>) -> Vec<String> {
    let file = |attempt: &str, path: PathBuf| format!("{attempt}:{}", path.display());
    let ram: Vec<_> = crate::common::lab::entries(&account.shared_memory());
    assert_eq!(ram.len(), 1, "{ram:?}");
    let shown = account.shown();
    let vmm = PathBuf::from(shown["vmm"]["directory"].as_str().expect("a directory"));
    let qemu = account.qemu().pid;
    let mut attempts = vec![
        file("list", account.shared_memory()),
        file("write", ram[0].clone()),
        file("list", account.home.clone()),
        file("write", account.home.join("disk.raw")),
        file("list", account.home.join("run/rekindle")),
        file("list", account.file("")),
        file("read", account.file("state.json")),
        file("write", account.file("lock")),
        file("read", account.file("console.log")),
        file("list", account.store().into()),
        file("create", Path::new(&account.store()).join("other")),
        file("list", account.home.join(".local/state/rekindle")),
    ];
    for socket in ["disk-disk0.sock", "disk-disk0.control"] {
        attempts.push(file("connect", account.file(socket)));
    }
    for socket in ["qmp.sock", "watch.sock", "console.sock"] {
        attempts.push(file("connect", vmm.join(socket)));
    }
    for file in ["mem", "environ", "maps"] {
        attempts.push(format!("read:/proc/{qemu}/{file}"));
    }
    attempts.extend([format!("signal:{qemu}"), format!("trace:{qemu}")]);
    attempts
}

/// Makes these attempts as a user. Returns the result of each.
fn attempt(account: &Account<'_>, attempts: &[String]) -> Vec<(String, String)> {
    let mut command = account.command(Path::new("python3"));
    command.args(["-c", ATTEMPTS]).args(attempts);
    let done = account.lab.finish(command).ok();
    let results: Vec<_> = done.stdout.lines().map(str::to_owned).collect();
    assert_eq!(results.len(), attempts.len(), "{done}");
    attempts.iter().cloned().zip(results).collect()
}

#[test]
fn vms_of_two_ordinary_users_are_protected_replaced_and_restored_without_a_privileged_process() {
    let lab = Lab::new();
    share(&lab);
    let accounts = [Account::new(&lab, 0), Account::new(&lab, 1)];
    let census = Census::start(&accounts);
    let guests = ["qemu", "rekindle broker", "rekindle disk", "rekindle watch"];
    let protected = ["qemu", "rekindle broker", "rekindle disk", "rekindle protect", "rekindle watch"];
    let mut expected = Vec::new();
    for account in &accounts {
        account.rekindle(&["run", "web.toml"]).ok();
        account.rekindle(&["store", "init", &account.store()]).ok();
    }
    for account in &accounts {
        let guest = &account.guest;
        wait_for("the guest to be up", DEADLINE, || guest.is_up().then_some(()));
        guest.touch("40M");
        guest.ask("write vda 10 100 3");
        guest.ask("drop-caches");
        let disk = guest.ask(&format!("read vda 0 {READ}"));
        assert_eq!(disk, digest(&account.home.join("disk.raw"), 0, READ));
        assert_processes(account, &guests);
        expected.push((guest.boot_id(), disk));
    }

    // Without access to the device, checkpoints are not possible, and the messages name the remedy.
    let [first, second] = &accounts;
    let store = first.store();
    let protect = ["protect", VM, "--store", &store, "--count", "1"];
    first.rekindle(&protect).status(1).prints(&[
        "web cannot be protected",
        "permit the user of this command",
        USERFAULTFD,
    ]);
    first.rekindle(&["doctor"]).prints(&["limited userfaultfd", "Permission denied", "docs/without-root.md"]);
    for account in &accounts {
        access_list::add_user(Path::new(USERFAULTFD), account.uid, access_list::READ | access_list::WRITE).unwrap();
        account.rekindle(&["doctor"]).prints(&["ok      userfaultfd"]);
    }

    let mut protectors = Vec::new();
    for account in &accounts {
        protectors.push(account.start_protector());
        wait_for("a checkpoint", DEADLINE, || (account.newest_checkpoint() > 0).then_some(()));
        assert_processes(account, &protected);
        let before = account.qemu();
        account.rekindle(&["replace-qemu", VM]).ok();
        assert_ne!(account.qemu(), before);
        account.guest.verify();
        account.wait_checkpoint();
        assert_processes(account, &protected);
    }

    for (account, other) in [(first, second), (second, first)] {
        let attempts = attempts_on(account);
        for (attempt, result) in attempt(account, &attempts) {
            // The owner's attempts show that the paths and processes exist.
            assert_eq!(result, "ok", "{attempt} by its owner");
        }
        for (attempt, result) in attempt(other, &attempts) {
            let denied = ["Permission denied", "Operation not permitted"];
            assert!(denied.contains(&result.as_str()), "{attempt} by another user: {result}");
        }
        other.rekindle(&["restore", "other", "--store", &account.store()]).status(1).prints(&["ermission denied"]);
    }

    for (account, mut protector) in accounts.iter().zip(protectors) {
        let qemu = account.qemu();
        qemu.kill().unwrap();
        assert!(qemu.wait_end(Duration::from_secs(10)).unwrap());
        protector.wait().unwrap();
        assert_processes(account, &["rekindle broker", "rekindle disk", "rekindle watch"]);
        account.rekindle(&["stop", "--now", VM]).ok();
        assert_processes(account, &[]);
        account.rekindle(&["restore", VM, "--store", &account.store()]).ok();
    }
    for (account, (boot, disk)) in accounts.iter().zip(expected) {
        let guest = &account.guest;
        wait_for("the guest to answer", DEADLINE, || guest.is_up().then_some(()));
        assert_eq!(guest.boot_id(), boot, "the guest has booted");
        guest.verify();
        guest.ask("drop-caches");
        assert_eq!(guest.ask(&format!("read vda 0 {READ}")), disk);
        wait_for("the memory to be loaded", DEADLINE, || (!account.file("fill.json").exists()).then_some(()));
        assert_processes(account, &guests);
        // It can be protected again.
        let mut protector = account.start_protector();
        account.wait_checkpoint();
        assert_processes(account, &protected);
        kill_process(Pid::from_child(&protector), Signal::TERM).unwrap();
        protector.wait().unwrap();
        account.rekindle(&["stop", "--now", VM]).ok();
        account.rekindle(&["ls"]).ok().prints(&["no VMs"]);
        assert_processes(account, &[]);
        assert!(crate::common::lab::entries(&account.shared_memory()).is_empty());
    }
    let seen = census.end();
    for kind in protected.iter().chain(&["rekindle pager", "rekindle replace-qemu", "rekindle restore"]) {
        assert!(seen.contains(*kind), "no {kind} in {seen:?}");
    }
}
