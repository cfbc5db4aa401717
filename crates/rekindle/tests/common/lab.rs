//! The environment of one test: run directory, RAM, network namespace. All are removed on drop, also after a panic.

use super::vm::Vm;
use super::{DEADLINE, observe};
use rekindle_qemu::binary::Binary;
use rekindle_testing::micro::KERNEL;
use rekindle_testing::object_store::ObjectStoreServer;
use rekindle_testing::tools;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Returns the major version of a QEMU binary.
pub fn major(qemu: &Path) -> u32 {
    static KNOWN: Mutex<BTreeMap<PathBuf, u32>> = Mutex::new(BTreeMap::new());
    let ask = || Binary::probe(qemu).expect("it is a QEMU").version.major;
    *KNOWN.lock().expect("nothing panics meanwhile").entry(qemu.to_owned()).or_insert_with(ask)
}

/// Environment of one test.
pub struct Lab {
    directory: tempfile::TempDir,
    /// Network namespace for the VMs' taps.
    pub namespace: String,
    subnets: AtomicU32,
}

impl Lab {
    /// Creates a lab. Needs root, because the tests reach guests over taps.
    pub fn new() -> Self {
        let root = rustix::process::geteuid().is_root();
        assert!(root, "the tests with guests need root, for taps and network namespaces; run: sudo make test");
        Self::without_root()
    }

    /// Creates a lab for VMs without taps.
    pub fn without_root() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let made = tempfile::Builder::new().prefix("rekindle-test-").tempdir_in("/dev/shm");
        let directory = made.expect("a directory in /dev/shm");
        fs::create_dir(directory.path().join("saved")).expect("a directory");
        let namespace = format!("rkt{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let lab = Self { directory, namespace, subnets: AtomicU32::new(0) };
        lab.configure_host("");
        lab
    }

    /// Replaces the host's configuration by these lines and what checkpoints may use.
    pub fn configure_host(&self, lines: &str) {
        self.write_host_config(".host.toml", lines);
    }

    /// Lets checkpoints use the files in this directory.
    pub fn allow_directory(&self, directory: &Path) {
        let path = self.path(".host.toml");
        let config = fs::read_to_string(&path).expect("a file in the lab");
        fs::write(path, config.replacen("paths = [", &format!("paths = [{directory:?}, "), 1))
            .expect("a file in the lab");
    }

    /// Lets checkpoints use the free arguments of QEMU in the XML of this domain.
    pub fn allow_arguments_of(&self, domain_xml: &str) {
        let uses = rekindle_libvirt::host_access::of_domain(domain_xml).expect("the XML of a domain");
        let arguments = rekindle_vm::restore_rules::option_texts(&uses.arguments);
        let path = self.path(".host.toml");
        let config = fs::read_to_string(&path).expect("a file in the lab");
        fs::write(path, format!("{config}arguments = {arguments:?}\n")).expect("a file in the lab");
    }

    /// Writes the configuration of another host of this lab.
    pub fn write_host_config(&self, name: &str, lines: &str) {
        // Labs of one test share their files.
        let directory = self.directory.path().parent().expect("it is not the root");
        fs::write(self.path(name), tools::host_config(lines, directory)).expect("a file in the lab");
    }

    /// Returns the path of a file in the lab's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the variables of an object store to a file for `--environment-file`. Returns its path.
    pub fn write_environment_file(&self, server: &ObjectStoreServer) -> String {
        let file = self.path("s3.env");
        let lines: Vec<String> = server.environment().iter().map(|(key, value)| format!("{key}={value}\n")).collect();
        fs::write(&file, lines.concat()).expect("a file in the lab");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("our own file");
        file.to_str().expect("a lab has a path in UTF-8").to_owned()
    }

    /// Returns the parent of the VMs' run directories.
    pub fn run_root(&self) -> PathBuf {
        self.path("run")
    }

    /// Returns the directory of saved states.
    pub fn save_dir(&self) -> PathBuf {
        self.path("saved")
    }

    /// Returns the paths of the micro guest's kernel and RAM disk.
    pub fn image(&self) -> (PathBuf, PathBuf) {
        (tools::micro().join(KERNEL), tools::micro().join("initrd"))
    }

    /// Returns the paths of kernel and RAM disk of the micro guest that can leak memory.
    pub fn leaky(&self) -> (PathBuf, PathBuf) {
        (tools::leaky().join(KERNEL), tools::leaky().join("initrd"))
    }

    /// Returns the paths of the Debian guest's kernel, RAM disk, first disk and second disk.
    pub fn debian(&self) -> [PathBuf; 4] {
        ["vmlinuz", "initrd", "disk.raw", "data.raw"].map(|name| tools::debian().join(name))
    }

    /// Returns a number that is unique in this lab, starting from 1.
    pub fn next_subnet(&self) -> u32 {
        self.subnets.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns a builder for the definition of a VM.
    pub fn vm(&self, name: &str) -> Vm<'_> {
        Vm::new(self, name)
    }

    /// Returns a command that runs `rekindle` in this lab.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        self.command_of(Path::new(env!("CARGO_BIN_EXE_rekindle")), arguments)
    }

    /// Returns a command that runs this copy of `rekindle` in this lab.
    pub fn command_of<S: AsRef<OsStr>>(&self, program: &Path, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).env("REKINDLE_RUN_DIR", self.run_root());
        command.env("REKINDLE_HOST_CONFIG", self.path(".host.toml"));
        command.env_remove("REKINDLE_FAULT").env_remove("REKINDLE_LOG").env_remove("REKINDLE_LOG_DIR");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Writes a script in place of `ssh`, which runs Rekindle in this lab, and returns its path. `prefix`: the beginning of
    /// the command. `FAR_FAULT` selects a fault there.
    pub fn write_ssh(&self, prefix: &str) -> PathBuf {
        let script = self.path("ssh");
        // The script's arguments are those of `ssh`: first the host, then a command for its shell.
        let text = format!(
            "#!/bin/sh\nshift\nREKINDLE_RUN_DIR={:?} REKINDLE_HOST_CONFIG={:?} REKINDLE_FAULT=$FAR_FAULT exec {prefix}sh -c \"$*\"\n",
            self.run_root(),
            self.path(".host.toml")
        );
        fs::write(&script, text).expect("a file in the lab");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("our own file");
        script
    }

    /// Runs `rekindle` with these arguments. The command may fail.
    pub fn rekindle<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> CommandResult {
        self.finish(self.command(arguments))
    }

    /// Runs a command, which may fail but must end before the deadline.
    pub fn finish(&self, mut command: Command) -> CommandResult {
        let command_line = format!("{command:?}");
        let child = command.spawn().unwrap_or_else(|e| panic!("{command_line}: {e}"));
        self.wait(child, command_line)
    }

    /// Waits for a command that was started with its output piped.
    pub fn wait(&self, mut child: Child, what: String) -> CommandResult {
        let collect = |pipe: Option<Box<dyn Read + Send>>| {
            thread::spawn(move || {
                let mut text = Vec::new();
                if let Some(mut pipe) = pipe {
                    let _ = pipe.read_to_end(&mut text);
                }
                String::from_utf8_lossy(&text).into_owned()
            })
        };
        let stdout = collect(child.stdout.take().map(|pipe| Box::new(pipe) as _));
        let stderr = collect(child.stderr.take().map(|pipe| Box::new(pipe) as _));
        let started = Instant::now();
        let mut late = false;
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child can be waited for") {
                break status;
            }
            if !late && started.elapsed() > DEADLINE {
                late = true;
                let _ = child.kill();
            }
            thread::sleep(Duration::from_millis(2));
        };
        let output = |reader: thread::JoinHandle<String>| reader.join().expect("a reader does not panic");
        let result = CommandResult {
            what,
            code: status.code(),
            stdout: output(stdout),
            stderr: output(stderr),
            lab_state: self.state_report(),
            took: started.elapsed(),
        };
        assert!(!late, "not within {DEADLINE:?}: {result}");
        result
    }

    /// Describes the state of all VMs, for the message of a failed assertion.
    pub fn state_report(&self) -> String {
        let mut text = String::new();
        let tail = |path: &Path, lines: usize| {
            let content = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            // Of the guest's ticks only the newest, which shows how long its kernel has run.
            let newest_tick = content.lines().rfind(|line| line.starts_with("tick "));
            let other_lines = content.lines().filter(|line| !line.starts_with("tick "));
            let shown: Vec<_> = other_lines.chain(newest_tick).collect();
            shown
                .iter()
                .skip(shown.len().saturating_sub(lines))
                .fold(String::new(), |text, line| text + "    " + line + "\n")
        };
        for vm in entries(&self.run_root()) {
            for path in entries(&vm) {
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                let shown = match name.as_str() {
                    "operation.json" => tail(&path, 60),
                    "console.log" => tail(&path, 8),
                    _ if name.starts_with("vmm-") => tail(&path.join("qemu.log"), 12),
                    _ => continue,
                };
                text += &format!("  {}:\n{shown}", path.display());
            }
        }
        for qemu in observe::qemus(&self.run_root()) {
            text += &format!("  QEMU {} in {}: {:?}\n", qemu.process.pid, qemu.directory.display(), qemu.run_state());
        }
        text
    }

    /// Returns the interfaces in the namespace, except `lo`.
    pub fn interfaces(&self) -> Vec<String> {
        let output = Command::new("ip").args(["-n", &self.namespace, "-o", "link"]).output().expect("ip runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.split(": ").nth(1)).filter_map(|name| name.split('@').next());
        names.map(|name| name.trim_end().to_owned()).filter(|name| name != "lo").collect()
    }

    /// Asserts that no VM has left anything: no QEMU, no RAM, no mount, no namespace, no run directory.
    pub fn assert_empty(&self) {
        let running: Vec<_> = observe::qemus(&self.run_root()).iter().map(|qemu| qemu.process.pid).collect();
        assert!(running.is_empty(), "QEMUs are left: {running:?}\n{}", self.state_report());
        let root = self.run_root();
        let remains = left_in(&root);
        assert!(remains.is_empty(), "left in {}: {remains:?}", root.display());
        assert!(entries(&root.join(".netns")).is_empty(), "namespaces are left: {:?}", entries(&root.join(".netns")));
        let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!mounts.contains(&*root.to_string_lossy()), "a mount is left in {}", root.display());
        assert!(!rekindle_kernel::netns::path(&self.namespace).exists(), "namespace {} is left", self.namespace);
    }

    /// Kills remaining processes and removes remaining mounts and the namespace.
    fn clean_up(&self) {
        // Kill only processes whose arguments contain this test's directory.
        let mark = self.directory.path().to_string_lossy().into_owned();
        for process in observe::with_argument_containing(&mark).unwrap_or_default() {
            let _ = process.kill();
            let _ = process.wait_end(Duration::from_secs(10));
        }
        let quiet = |program: &str, arguments: &[&OsStr]| {
            let _ = Command::new(program).args(arguments).stderr(Stdio::null()).status();
        };
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for mount in mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|path| path.starts_with(&mark)) {
            quiet("umount", &[OsStr::new("-l"), OsStr::new(mount)]);
        }
        if rekindle_kernel::netns::path(&self.namespace).exists() {
            quiet("ip", &[OsStr::new("netns"), OsStr::new("del"), OsStr::new(&self.namespace)]);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let names =
            entries(&self.run_root()).into_iter().filter_map(|path| path.file_name()?.to_str().map(str::to_owned));
        let names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        if !names.is_empty() {
            let stopped = self.command(["stop", "--now"].into_iter().chain(names.iter().map(String::as_str))).output();
            if let (Ok(output), true) = (stopped, thread::panicking()) {
                eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            }
        }
        self.clean_up();
    }
}

/// Returns the entries that are left in a run root, except the cache about QEMU binaries and the logs, which stay.
pub fn left_in(root: &Path) -> Vec<PathBuf> {
    let stays = |path: &PathBuf| {
        [".netns", ".binaries", ".log", ".monitors", ".machines", ".stores", ".users", ".jail"]
            .iter()
            .any(|name| path.ends_with(name))
    };
    entries(root).into_iter().filter(|path| !stays(path)).collect()
}

/// Returns the paths in a directory, sorted. Returns none if the directory does not exist.
pub fn entries(directory: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<_> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

/// Output and exit status of a command that has ended.
pub struct CommandResult {
    what: String,
    /// Exit status; `None` if a signal ended the command.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    lab_state: String,
    pub took: Duration,
}

impl std::fmt::Display for CommandResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, code, stdout, stderr, lab_state, took } = self;
        write!(
            f,
            "{what}\nexit status {code:?} after {took:?}\nstdout:\n{stdout}\nstderr:\n{stderr}\nafterwards:\n{lab_state}"
        )
    }
}

impl CommandResult {
    /// Asserts the exit status.
    #[track_caller]
    pub fn status(self, code: i32) -> Self {
        assert!(self.code == Some(code), "exit status {code} was expected of {self}");
        self
    }

    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.status(0)
    }

    /// Asserts that a signal ended the command, as an injected fault does.
    #[track_caller]
    pub fn killed(&self) {
        assert!(self.code.is_none(), "the command was to be killed: {self}");
    }

    /// Asserts that each of `words` is in standard output or standard error.
    #[track_caller]
    pub fn prints(self, words: &[&str]) -> Self {
        let text = format!("{}{}", self.stdout, self.stderr);
        for word in words {
            assert!(text.contains(word), "{word:?} was expected in the output of {self}");
        }
        self
    }

    /// Parses standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("no JSON ({e}) from {self}"))
    }
}
