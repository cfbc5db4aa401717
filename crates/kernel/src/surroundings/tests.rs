//! Each test starts a process as a manager would, with the tools of util-linux, and a second one in its surroundings.

use super::*;
use command_fds::FdMapping;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// A process that answers each line.
struct Running {
    process: Process,
    child: Option<Child>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        assert!(self.process.wait_end(Duration::from_secs(60)).unwrap());
        if let Some(child) = &mut self.child {
            child.wait().unwrap();
        }
    }
}

/// Sends a line and returns the answer. From then on the program runs, and not a tool that starts it.
fn answer(mut input: impl Write, output: impl std::io::Read) -> String {
    input.write_all(b"{}\n").unwrap();
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).unwrap();
    line
}

/// Starts `command`, whose program answers.
fn source(command: &mut Command) -> Running {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let process = Process::of(child.id()).unwrap();
    assert_ne!(answer(child.stdin.as_mut().unwrap(), child.stdout.as_mut().unwrap()), "", "it ended: {command:?}");
    Running { process, child: Some(child) }
}

/// A process that was started in the surroundings of another one.
struct Destination {
    running: Running,
    answer: String,
    _pipes: (std::io::PipeWriter, std::io::PipeReader),
}

/// Starts `program` in the surroundings, with pipes as standard input and output.
fn destination(environment: &ProcessEnvironment, program: &Path, arguments: &[&str]) -> Destination {
    let (stdin, mut input) = std::io::pipe().unwrap();
    let (mut output, stdout) = std::io::pipe().unwrap();
    let mapping = |parent_fd: OwnedFd, child_fd| FdMapping { parent_fd, child_fd };
    let descriptors = vec![mapping(stdin.into(), 0), mapping(stdout.into(), 1)];
    let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
    let process = environment.spawn(Launch { program, arguments: &arguments, descriptors, lock: None }).unwrap();
    let answer = answer(&mut input, &mut output);
    Destination { running: Running { process, child: None }, answer, _pipes: (input, output) }
}

fn start_cat(environment: &ProcessEnvironment, descriptors: Vec<FdMapping>) -> Result<Process, EnvironmentError> {
    environment.spawn(Launch { program: Path::new("/bin/cat"), arguments: &[], descriptors, lock: None })
}

/// Everything that must be equal.
fn surroundings(process: Process) -> BTreeMap<String, String> {
    let directory = PathBuf::from(format!("/proc/{}", process.pid));
    let text = |name: &str| String::from_utf8(fs::read(directory.join(name)).unwrap()).unwrap();
    let mut all = BTreeMap::new();
    const STATUS: [&str; 11] = [
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Cpus_allowed",
    ];
    for (key, value) in text("status").lines().filter_map(|line| line.split_once(':')) {
        if STATUS.contains(&key) {
            all.insert(key.to_owned(), value.trim().to_owned());
        }
    }
    assert_eq!(all.len(), STATUS.len());
    for link in ["ns/mnt", "ns/net", "ns/ipc", "ns/uts", "ns/cgroup", "ns/user", "ns/time", "ns/pid", "cwd", "root"] {
        all.insert(link.into(), fs::read_link(directory.join(link)).unwrap().to_str().unwrap().to_owned());
    }
    for name in ["limits", "cgroup", "oom_score_adj"] {
        all.insert(name.into(), text(name));
    }
    let environ = text("environ");
    let mut variables: Vec<_> = environ.split('\0').collect();
    variables.sort_unstable();
    all.insert("environ".into(), variables.join(" "));
    let stat = text("stat");
    for (name, number) in [("nice", 19), ("rt_priority", 40), ("policy", 41)] {
        all.insert(name.into(), stat_field(&stat, number).to_owned());
    }
    let io_priority = Command::new("ionice").args(["-p", &process.pid.to_string()]).output().unwrap();
    all.insert("ionice".into(), String::from_utf8(io_priority.stdout).unwrap());
    all
}

/// Cgroups of a test: one in each hierarchy where one can be made, in version 2 a threaded one below another.
struct Cgroups(Vec<PathBuf>);

impl Cgroups {
    fn make(name: &str) -> Self {
        let mut made = Vec::new();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        for line in mounts.lines() {
            let (mount, file_system) = line.split_once(" - ").unwrap();
            let hierarchy = Path::new(mount.split(' ').nth(4).unwrap());
            let directory = hierarchy.join(format!("rekindle-test-{name}-{}", std::process::id()));
            let is_v2 = file_system.starts_with("cgroup2 ");
            // A new cpuset has no processors.
            let is_v1 = file_system.starts_with("cgroup ") && !file_system.contains("cpuset");
            if !(is_v1 || is_v2) || fs::create_dir(&directory).is_err() {
                continue;
            }
            made.push(directory.clone());
            if is_v2 {
                let leaf = directory.join("emulator");
                fs::create_dir(&leaf).unwrap();
                fs::write(leaf.join("cgroup.type"), "threaded").unwrap();
                made.push(leaf);
            }
        }
        assert!(!made.is_empty(), "no cgroup can be made: run the test as root, on a host with /sys/fs/cgroup");
        Self(made)
    }

    /// Those that processes join.
    fn leaves(&self) -> Vec<&Path> {
        let is_parent = |path: &Path| self.0.iter().any(|other| other.parent() == Some(path));
        self.0.iter().map(PathBuf::as_path).filter(|path| !is_parent(path)).collect()
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for directory in self.0.iter().rev() {
            // Missing if the test has removed it.
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Runs a program as another user with few capabilities, and without environment variables of ours.
const AS_OTHER_USER: [&str; 10] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65533",
    "--groups=7,1000,65533",
    "--bounding-set=-all,+net_admin,+net_raw,+setpcap",
    "--inh-caps=-all,+net_admin",
    "--ambient-caps=-all,+net_admin",
    "--no-new-privs",
    "env",
    "-i",
];

/// Script: joins the cgroups `$1`... up to `--`, and executes the command that follows.
const JOIN_CGROUPS: &str = r#"
while [ "$1" != -- ]; do
    echo $$ >"$1/cgroup.procs" || exit
    shift
done
shift
umask 027
exec "$@"
"#;

/// Script: makes the root directory visible at `$1`, and executes the command that follows.
const BIND_ROOT: &str = r#"
mount --bind / "$1" || exit
shift
exec "$@"
"#;

/// A command that starts `program` in surroundings that differ from ours in everything. Each tool in it changes one
/// part of its own surroundings, and executes the rest of the command line.
fn isolated(cgroups: &Cgroups, root: &Path, program: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // The argument after a script is its `$0`.
    command.args(["-c", JOIN_CGROUPS, "sh"]).args(cgroups.leaves()).arg("--");
    command.args(["unshare", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--time", "--"]);
    command.args(["sh", "-c", BIND_ROOT, "sh"]).arg(root);
    command.args(["taskset", "-c", "0"]);
    command.args(["ionice", "-c", "2", "-n", "6"]);
    command.args(["nice", "-n", "5"]);
    // The score by which the kernel chooses a process to kill if memory runs out.
    command.args(["choom", "-n", "321", "--"]);
    command.args(["prlimit", "--nofile=300:400", "--core=0:4096", "--memlock=65536:65536", "--"]);
    command.arg("unshare").arg("--root").arg(root).args(["--wd", "/usr", "--"]);
    command.args(AS_OTHER_USER).args(["A=1", "B=two words", "EMPTY="]).args(program);
    command
}

/// What `isolated` leaves as it is: namespaces that cannot be reproduced (see
/// [`what_cannot_be_reproduced_is_rejected`]), and the scheduling policy, which
/// [`real_time_scheduling_is_that_of_the_source`] tests.
const SAME_AS_OURS: [&str; 4] = ["ns/pid", "ns/user", "policy", "rt_priority"];

/// Field `number` of `/proc/PID/stat`, as proc_pid_stat(5) counts them. The second field is a name in parentheses,
/// which may contain spaces.
fn stat_field(stat: &str, number: usize) -> &str {
    const FIRST_AFTER_NAME: usize = 3;
    let after_name = stat.rsplit_once(") ").unwrap().1;
    after_name.split_whitespace().nth(number - FIRST_AFTER_NAME).unwrap()
}

fn assert_same_surroundings(name: &str, program: &[&str]) {
    let (cgroups, root) = (Cgroups::make(name), tempfile::tempdir().unwrap());
    let source = source(&mut isolated(&cgroups, root.path(), program));
    let environment = ProcessEnvironment::of(source.process).unwrap();
    let destination = destination(&environment, Path::new(program[0]), &program[1..]);
    assert_ne!(destination.answer, "");
    let process = destination.running.process;
    let (before, after) = (surroundings(source.process), surroundings(process));
    assert_eq!(before, after);
    // The comparison has a meaning only for what differs from the surroundings of the test.
    let ours = surroundings(Process::current().unwrap());
    let same: Vec<_> = before.iter().filter(|(key, value)| ours[*key] == **value).map(|(key, _)| &**key).collect();
    assert_eq!(same, SAME_AS_OURS);
    for directory in cgroups.leaves().into_iter().filter(|path| !path.ends_with("emulator")) {
        let members = fs::read_to_string(directory.join("cgroup.procs")).unwrap();
        assert!(members.lines().any(|pid| pid == process.pid.to_string()), "{}: {members}", directory.display());
    }
    const SESSION: usize = 6;
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
    assert_eq!(stat_field(&stat, SESSION), process.pid.to_string(), "it leads a session of its own");
}

#[test]
fn a_process_starts_in_the_surroundings_of_another_one() {
    assert_same_surroundings("cat", &["/bin/cat"]);
}

#[test]
fn a_qemu_starts_in_the_surroundings_of_another_one() {
    let qemu = rekindle_testing::tools::qemu_new().to_str().unwrap();
    let arguments = ["-machine", "none", "-nodefaults", "-display", "none", "-S", "-sandbox", "on", "-qmp", "stdio"];
    assert_same_surroundings("qemu", &[&[qemu], &arguments[..]].concat());
}

#[test]
fn surroundings_like_ours_need_no_descriptor() {
    let source = source(&mut Command::new("cat"));
    let environment = ProcessEnvironment::of(source.process).unwrap();
    assert!(environment.cgroups.is_empty() && environment.location.namespaces.is_empty());
    let destination = destination(&environment, Path::new("/bin/cat"), &[]);
    assert_eq!(destination.answer, "{}\n");
    assert_eq!(surroundings(source.process), surroundings(destination.running.process));
}

#[test]
fn real_time_scheduling_is_that_of_the_source() {
    let source = source(Command::new("chrt").args(["--rr", "3", "cat"]));
    let environment = ProcessEnvironment::of(source.process).unwrap();
    let destination = destination(&environment, Path::new("/bin/cat"), &[]);
    let after = surroundings(destination.running.process);
    assert_eq!((&*after["policy"], &*after["rt_priority"]), ("2", "3"));
}

#[test]
fn namespaces_live_as_long_as_the_environment_that_was_read() {
    let source = source(Command::new("unshare").args(["--net", "cat"]));
    let environment = ProcessEnvironment::of(source.process).unwrap();
    let network = surroundings(source.process)["ns/net"].clone();
    drop(source);
    let destination = destination(&environment, Path::new("/bin/cat"), &[]);
    assert_eq!(surroundings(destination.running.process)["ns/net"], network);
}

#[test]
fn descriptors_get_their_numbers_and_no_other_is_inherited() {
    let source = source(&mut Command::new("cat"));
    let environment = ProcessEnvironment::of(source.process).unwrap();
    let files = tempfile::tempdir().unwrap();
    // Also numbers that this process uses itself, e.g. for the pipe by which the standard library reports errors.
    let numbers = 0..40u32;
    let path = |number: u32| files.path().join(number.to_string());
    let descriptors = numbers
        .clone()
        .map(|number| {
            let file = fs::File::options().create_new(true).read(true).write(true).open(path(number)).unwrap();
            FdMapping { parent_fd: file.into(), child_fd: number.cast_signed() }
        })
        .collect();
    let lock = files.path().join("lock");
    let arguments = ["1000".into()];
    let launch = Launch { program: Path::new("/bin/sleep"), arguments: &arguments, descriptors, lock: Some(&lock) };
    let running = Running { process: environment.spawn(launch).unwrap(), child: None };
    let holders = crate::lockfile::holders(&lock).unwrap();
    assert_eq!(holders, [running.process]);
    // The descriptor of the lock may have any number.
    let open = rekindle_testing::process::descriptors(running.process.pid);
    let (of_lock, others): (BTreeMap<u32, String>, _) = open.into_iter().partition(|(_, file)| Path::new(file) == lock);
    assert_eq!(of_lock.len(), 1, "{of_lock:?}");
    let expected: BTreeMap<u32, String> =
        numbers.map(|number| (number, path(number).to_str().unwrap().to_owned())).collect();
    assert_eq!(others, expected);
}

/// Returns step and errno of a failed start.
fn failure(result: Result<Process, EnvironmentError>) -> (Step, Option<i32>) {
    match result {
        Err(EnvironmentError::Start { step, source, .. }) => (step, source.raw_os_error()),
        other => panic!("{other:?}"),
    }
}

fn environment_of_cat(command: &mut Command) -> ProcessEnvironment {
    ProcessEnvironment::of(source(command).process).unwrap()
}

#[test]
fn the_failed_step_is_named() {
    let new = || environment_of_cat(&mut Command::new("cat"));
    let environment = new();
    let missing = Launch { program: Path::new("/no/program"), arguments: &[], descriptors: Vec::new(), lock: None };
    let error = environment.spawn(missing).unwrap_err();
    let pid = environment.process.pid;
    let text = format!("cannot start /no/program in the surroundings of process {pid}: executing the program: No such");
    assert!(error.to_string().starts_with(&text), "{error}");

    let mut environment = new();
    let file = Arc::new(OwnedFd::from(fs::File::open("/dev/null").unwrap()));
    let kind = rustix::thread::LinkNameSpaceType::Network;
    environment.location.namespaces.push(location::Namespace { kind, name: "network", file });
    assert_eq!(failure(start_cat(&environment, Vec::new())), (Step::Namespace("network"), Some(libc::EINVAL)));

    for (label, name) in [
        (SecurityLabel::Selinux { context: "a:b:c".into() }, "a:b:c"),
        (SecurityLabel::AppArmor { profile: "rekindle-no-such-profile".into() }, "rekindle-no-such-profile"),
    ] {
        let environment = ProcessEnvironment { label: Some(label), ..new() };
        let (step, errno) = failure(start_cat(&environment, Vec::new()));
        assert_eq!(step, Step::Label(name.into()));
        assert!(errno.is_some());
    }

    let mut environment = new();
    // No kernel has this one.
    environment.credentials.capabilities.ambient = rustix::thread::CapabilitySet::from_bits_retain(1 << 63);
    assert_eq!(failure(start_cat(&environment, Vec::new())), (Step::Capabilities, Some(libc::EINVAL)));

    assert_eq!(fs::read_to_string("/proc/thread-self/children").unwrap(), "", "children are left");
}

#[test]
fn a_removed_cgroup_is_named() {
    let cgroups = Cgroups::make("removed");
    let leaf = cgroups.leaves()[0].to_owned();
    let join = format!("echo $$ >{}/cgroup.procs && exec cat", leaf.display());
    let environment = environment_of_cat(Command::new("sh").args(["-c", &join]));
    assert_eq!(environment.cgroups.len(), 1);
    fs::remove_dir(&leaf).unwrap();
    assert_eq!(failure(start_cat(&environment, Vec::new())), (Step::Cgroup(leaf), Some(libc::ENOENT)));
}

#[test]
fn a_lock_that_another_process_holds_is_named() {
    let environment = environment_of_cat(&mut Command::new("cat"));
    let root = tempfile::tempdir().unwrap();
    let lock = root.path().join("qemu.lock");
    let arguments = ["1000".into()];
    let start = || {
        let program = Path::new("/bin/sleep");
        environment.spawn(Launch { program, arguments: &arguments, descriptors: Vec::new(), lock: Some(&lock) })
    };
    let _first = Running { process: start().unwrap(), child: None };
    assert_eq!(failure(start()), (Step::Lock(lock.clone()), Some(libc::EAGAIN)));
}

/// A Python program that drops its capabilities after its start, and answers a line.
const DROP_CAPABILITIES: &str = "import ctypes
LINUX_CAPABILITY_VERSION_3 = 0x20080522
THIS_PROCESS = 0
header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, THIS_PROCESS)
# Effective, permitted and inheritable, in two halves of 32 bits each.
no_capabilities = (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, no_capabilities) == 0
print(input(), flush=True)
input()";

/// Returns the error of reading the surroundings of `command`.
fn environment_error(command: &mut Command) -> EnvironmentError {
    ProcessEnvironment::of(source(command).process).unwrap_err()
}

#[test]
fn what_cannot_be_reproduced_is_rejected() {
    let error = environment_error(Command::new("unshare").args(["--user", "cat"]));
    assert!(matches!(error, EnvironmentError::OwnNamespace { kind: "user", .. }), "{error}");
    let error = environment_error(Command::new("python3").args(["-c", DROP_CAPABILITIES]));
    assert!(matches!(error, EnvironmentError::DroppedCapabilities { .. }), "{error}");
}

#[test]
fn a_process_that_has_ended_is_rejected_also_if_its_number_is_used_again() {
    let gone = source(&mut Command::new("cat")).process;
    let error = ProcessEnvironment::of(gone).unwrap_err();
    assert!(matches!(error, EnvironmentError::Ended { pid } if pid == gone.pid), "{error}");
    let number_used_again = Process { started: gone.started + 1, ..Process::current().unwrap() };
    assert!(matches!(ProcessEnvironment::of(number_used_again), Err(EnvironmentError::Ended { .. })));
}

#[test]
fn two_descriptors_with_one_number_are_rejected() {
    let file = || FdMapping { parent_fd: fs::File::open("/dev/null").unwrap().into(), child_fd: 7 };
    let error = start_cat(&environment_of_cat(&mut Command::new("cat")), vec![file(), file()]).unwrap_err();
    assert!(matches!(error, EnvironmentError::DuplicateDescriptor { number: 7 }), "{error}");
}

/// A program with three threads, whose numbers it prints.
const THREADS: &str = "import sys, threading
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
print(input(), *(thread.native_id for thread in threads), flush=True); input()";

struct Threads {
    running: Running,
    roles: Vec<RoleThread>,
}

impl Threads {
    fn start() -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", THREADS]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        let line = answer(child.stdin.as_mut().unwrap(), child.stdout.as_mut().unwrap());
        let threads = line.split_whitespace().skip(1).map(|number| number.parse().unwrap());
        let roles = [ThreadRole::Vcpu(0), ThreadRole::Vcpu(1), ThreadRole::IoThread("io0".into())];
        let mut roles: Vec<_> =
            roles.into_iter().zip(threads).map(|(role, thread)| RoleThread { role, thread }).collect();
        assert_eq!(roles.len(), 3);
        roles.insert(0, RoleThread { role: ThreadRole::Other, thread: process.pid });
        Self { running: Running { process, child: Some(child) }, roles }
    }

    /// Scheduling and cgroups of each thread.
    fn places(&self) -> Vec<(Scheduling, String)> {
        let cgroup = |thread| fs::read_to_string(format!("/proc/{}/task/{thread}/cgroup", self.running.process.pid));
        self.roles.iter().map(|place| (Scheduling::of(place.thread).unwrap(), cgroup(place.thread).unwrap())).collect()
    }
}

fn run(program: &str, arguments: &[&str]) {
    assert!(Command::new(program).args(arguments).stdout(Stdio::null()).status().unwrap().success(), "{arguments:?}");
}

#[test]
fn threads_get_the_places_of_their_roles() {
    let cgroups = Cgroups::make("threads");
    let (source, destination) = (Threads::start(), Threads::start());
    for threads in [&source, &destination] {
        // In version 2 both processes are in the same cgroup, and a thread of the source in a threaded one below it.
        for directory in cgroups.0.iter().filter(|path| !path.ends_with("emulator")) {
            fs::write(directory.join("cgroup.procs"), threads.running.process.pid.to_string()).unwrap();
        }
    }
    let [_, vcpu_0, vcpu_1, io_thread] = &source.roles[..] else { panic!("four threads") };
    let (vcpu_0, vcpu_1, io_thread) =
        (vcpu_0.thread.to_string(), vcpu_1.thread.to_string(), io_thread.thread.to_string());
    run("taskset", &["-p", "-c", "1", &vcpu_0]);
    run("chrt", &["--batch", "-p", "0", &vcpu_0]);
    run("renice", &["-n", "7", "-p", &vcpu_1]);
    // The I/O thread leaves the cgroup of its process. In version 2 it may only go to a threaded one below it; in
    // version 1 it goes to the parent, whose file for single threads is `tasks`.
    for leaf in cgroups.leaves() {
        let is_v2 = leaf.ends_with("emulator");
        let threads = if is_v2 { leaf.join("cgroup.threads") } else { leaf.parent().unwrap().join("tasks") };
        fs::write(threads, &io_thread).unwrap();
    }
    let places = ThreadPlaces::of(source.running.process, &source.roles).unwrap();
    let before = source.places();
    assert_ne!(before, destination.places());
    // The second time nothing is left to change.
    for _ in 0..2 {
        places.apply(destination.running.process, &destination.roles).unwrap();
        assert_eq!(before, destination.places());
    }
    assert_eq!(before, source.places());
    let unknown = RoleThread { role: ThreadRole::Vcpu(2), thread: destination.running.process.pid };
    let error = places.apply(destination.running.process, &[unknown]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the process that is replaced has no thread of virtual CPU 2, which its replacement has"
    );
    // A thread that the process does not have is skipped: here, one of the other process.
    let ended = RoleThread { role: ThreadRole::Vcpu(0), thread: source.running.process.pid };
    places.apply(destination.running.process, &[ended]).unwrap();
    assert_eq!(before, source.places());
}
