//! The emulator of a guest's TPM, a process of the program `swtpm`. It serves one QEMU, so the destination gets another one,
//! with the same settings and in the same surroundings.
//!
//! | step | emulator of the source | emulator of the destination |
//! |---|---|---|
//! | start of the destination | serves the source | waits with a socket of its own, and has not opened the TPM's state |
//! | pause | QEMU reads the state from it, with those of the devices | gets the state from QEMU, and writes it to its directory |
//! | end of the source | is killed, so that it removes and writes nothing | its socket and its pid file replace those of the source's |
//! | after a failure | continues, and writes its state at the next change | is killed, and its socket is removed |
//!
//! Both have the same directory. The second one opens the state there only when QEMU gives it one, and locks the file `.lock`
//! there then. The source's holds the lock of that file, which is therefore renamed meanwhile.
//!
//! libvirt's AppArmor profiles name the socket of the source's emulator. So the second one makes none: it inherits one.

use super::{UnpreparedError, pid_file};
use crate::error::RebootError;
use command_fds::FdMapping;
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::{Launch, ProcessEnvironment};
use rekindle_qemu::takeover_command::{CommandLine, Descriptor, ListenAddress, SourceDescriptor, open_descriptors};
use rekindle_vm::journal::{MovedFile, PassedFile, PassedParts, PassedTpm};
use rekindle_vm::rundir::ignore_missing;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the program.
const PROGRAM: &str = "swtpm";
/// How long it may take to answer. It usually takes milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a killed emulator may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// End of the socket's name until the source has ended.
const WAITING: &str = ".rekindle";
/// Settings that name a descriptor of the source's emulator, or a file that it has removed.
const NOT_REPEATABLE: [&str; 5] = ["fd", "clientfd", "pwdfd", "pwdfile-fd", "remove"];
/// The number at which the emulator inherits its socket.
const LISTENER: RawFd = 3;
/// The command of an emulator that asks what it can do, and the length of its reply.
const GET_CAPABILITY: [u8; 4] = 1_u32.to_be_bytes();
const CAPABILITY_BYTES: usize = 8;

/// The emulator of the source's TPM, and what starts the one of the destination.
#[derive(Debug)]
pub(crate) struct TpmEmulator {
    process: Process,
    binary: PathBuf,
    environment: ProcessEnvironment,
    /// Arguments of the destination's emulator.
    arguments: Vec<String>,
    pub passed: PassedTpm,
    /// The connection for the destination, when its emulator runs.
    connection: Option<UnixStream>,
}

/// Finds the emulator to which the source is connected; `None` if the guest has no TPM.
///
/// # Errors
/// Why the destination cannot have another one.
pub(crate) fn inspect(line: &CommandLine) -> Result<Option<TpmEmulator>, String> {
    let server = line.descriptors.values().find_map(|descriptor| match descriptor {
        Descriptor::TpmEmulator { server } => Some(server),
        _ => None,
    });
    server.map(|server| of_server(server).map_err(|why| format!("the TPM's emulator at {server}: {why}"))).transpose()
}

fn of_server(server: &str) -> Result<TpmEmulator, String> {
    if !server.starts_with('/') {
        return Err("its path is relative: start it with the full path".into());
    }
    let [process] = emulators_at(Path::new(server)).map_err(|e| e.to_string())?[..] else {
        return Err(format!("no process, or several, of the program {PROGRAM} listens there"));
    };
    let words = fs::read(format!("/proc/{}/cmdline", process.pid)).map_err(|e| e.to_string())?;
    let words = words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let words: Vec<String> = words.skip(1).collect();
    let successor = Successor::of(words.strip_suffix(&[String::new()]).unwrap_or(&words))?;
    let environment = ProcessEnvironment::of(process).map_err(|e| e.to_string())?;
    let binary = fs::read_link(format!("/proc/{}/exe", process.pid)).map_err(|e| e.to_string())?;
    let socket = waiting_socket(Path::new(server));
    let pid_file = successor.pid_file.unwrap_or_else(|| socket.path.with_extension("pid"));
    let passed = PassedTpm {
        pid: process.pid,
        started: process.started,
        pid_file: Some(pid_file).filter(|path| pid_file::names(path, process.pid)),
        lock: successor.state_directory.map(|directory| moved_lock(&directory)),
        socket,
    };
    Ok(TpmEmulator { process, binary, environment, arguments: successor.arguments, passed, connection: None })
}

/// Lists the emulators whose socket was made at this path. It may have been renamed since.
fn emulators_at(path: &Path) -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(process) = Process::of(pid) else { continue };
        let is_emulator = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == PROGRAM);
        if is_emulator {
            let is_here = |open: &SourceDescriptor| match open {
                SourceDescriptor::Listener(ListenAddress::Unix(bound)) => Path::new(bound) == path,
                _ => false,
            };
            match open_descriptors(process) {
                Ok(open) if open.values().any(is_here) => found.push(process),
                // It has ended.
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
    }
    Ok(found)
}

/// Returns where the socket of the destination's emulator is. An earlier replacement has renamed that of `server`.
fn waiting_socket(server: &Path) -> PassedFile {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let original = name(server);
    let original = original.strip_suffix(WAITING).unwrap_or(&original);
    let path = server.with_file_name(original);
    PassedFile { waiting: server.with_file_name(format!("{original}{WAITING}")), path }
}

fn moved_lock(state_directory: &Path) -> MovedFile {
    MovedFile { path: state_directory.join(".lock"), moved: state_directory.join(".lock.rekindle") }
}

/// What the arguments of an emulator state about its successor.
struct Successor {
    arguments: Vec<String>,
    pid_file: Option<PathBuf>,
    state_directory: Option<PathBuf>,
}

impl Successor {
    fn of(arguments: &[String]) -> Result<Self, String> {
        if arguments.first().is_none_or(|kind| kind != "socket") {
            return Err(format!("it is no `{PROGRAM} socket`"));
        }
        let mut successor = Self { arguments: Vec::new(), pid_file: None, state_directory: None };
        let mut rest = arguments.iter();
        while let Some(word) = rest.next() {
            // `--ctrl VALUE` or `--ctrl=VALUE`
            let (option, mut value) = match word.split_once('=') {
                Some((option, value)) if option.starts_with("--") => (option, Some(value.to_owned())),
                _ => (word.as_str(), None),
            };
            match option {
                "--ctrl" | "--pid" | "--tpmstate" | "--log" | "--key" | "--migration-key" | "--runas" | "-r"
                    if value.is_none() =>
                {
                    value = rest.next().cloned();
                }
                "--server" | "--port" | "-p" | "--fd" | "-f" => return Err(format!("{option} is not supported yet")),
                _ => {}
            }
            match value {
                Some(value) => successor.add(option, Settings::parse(&value))?,
                None => successor.arguments.push(word.clone()),
            }
        }
        Ok(successor)
    }

    fn add(&mut self, option: &str, mut settings: Settings) -> Result<(), String> {
        match option {
            "--ctrl" => settings = Settings::parse(&format!("type=unixio,fd={LISTENER}")),
            _ => {
                if let Some(key) = NOT_REPEATABLE.iter().find(|key| settings.get(key).is_some()) {
                    return Err(format!("{option} {key}=: another emulator cannot be started with it"));
                }
            }
        }
        match option {
            // AppArmor may forbid it, and a process removes its pid file when it ends.
            "--pid" => {
                self.pid_file = settings.get("file").map(PathBuf::from);
                return Ok(());
            }
            // It is started as the user that the source's has changed to.
            "--runas" | "-r" => return Ok(()),
            "--tpmstate" => {
                let uri = settings.get("backend-uri").and_then(|uri| uri.strip_prefix("dir://"));
                self.state_directory = settings.get("dir").or(uri).map(PathBuf::from);
            }
            "--log" => settings.0.retain(|setting| setting != "truncate"),
            _ => {}
        }
        self.arguments.extend([option.to_owned(), settings.0.join(",")]);
        Ok(())
    }
}

/// The value of an option: `KEY=VALUE,...`.
struct Settings(Vec<String>);

impl Settings {
    fn parse(text: &str) -> Self {
        Self(text.split(',').map(str::to_owned).collect())
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find_map(|setting| setting.strip_prefix(key)?.strip_prefix('='))
    }
}

impl TpmEmulator {
    /// Starts the emulator of the destination, and connects to it.
    pub(crate) fn start(&mut self, name: &str) -> Result<(), RebootError> {
        end_successor(&self.passed)?;
        if let Some(MovedFile { path, moved }) = &self.passed.lock {
            ignore_missing(fs::rename(path, moved)).map_err(RebootError::file(path))?;
        }
        let waiting = &self.passed.socket.waiting;
        let listener = self.listen().map_err(RebootError::file(waiting))?;
        let descriptors = self.descriptors(listener).map_err(RebootError::file(waiting))?;
        let arguments: Vec<OsString> = self.arguments.iter().map(OsString::from).collect();
        let launch = Launch { program: &self.binary, arguments: &arguments, descriptors, lock: None };
        self.environment.spawn(launch).map_err(UnpreparedError::from)?;
        let connected = connect(waiting).map_err(|source| {
            let command = format!("{PROGRAM} {}", self.arguments.join(" "));
            UnpreparedError::Tpm { name: name.into(), command, source }
        })?;
        self.connection = Some(connected);
        Ok(())
    }

    /// Makes the socket of the destination's emulator, with the owner and the mode of the source's.
    fn listen(&self) -> io::Result<OwnedFd> {
        let PassedFile { path, waiting } = &self.passed.socket;
        let listener = UnixListener::bind(waiting)?;
        let socket = fs::symlink_metadata(path)?;
        fs::set_permissions(waiting, Permissions::from_mode(socket.mode() & 0o7777))?;
        chown(waiting, Some(socket.uid()), Some(socket.gid()))?;
        Ok(listener.into())
    }

    /// Returns what the emulator inherits: the output of the source's, and its socket.
    fn descriptors(&self, listener: OwnedFd) -> io::Result<Vec<FdMapping>> {
        let inherited = |number| Ok(FdMapping { parent_fd: descriptor::take(self.process, number)?, child_fd: number });
        let outputs: io::Result<Vec<FdMapping>> = [1, 2].into_iter().map(inherited).collect();
        let mut descriptors = outputs?;
        descriptors.push(FdMapping { parent_fd: listener, child_fd: LISTENER });
        Ok(descriptors)
    }

    /// Returns the connection to the destination's emulator.
    pub(crate) fn connection(&self) -> io::Result<OwnedFd> {
        let connection = self.connection.as_ref().ok_or_else(|| io::Error::other("the TPM's emulator does not run"))?;
        Ok(connection.try_clone()?.into())
    }
}

/// Connects to an emulator, and asks it for an answer: one that has failed would be noticed in the pause only.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let mut connection = UnixStream::connect(socket)?;
    connection.set_read_timeout(Some(START_TIMEOUT))?;
    connection.write_all(&GET_CAPABILITY)?;
    connection.read_exact(&mut [0; CAPABILITY_BYTES])?;
    connection.set_read_timeout(None)?;
    Ok(connection)
}

/// Ends the emulator of the source, and gives that of the destination its place. Can be repeated.
///
/// *Needs:* the source is frozen, or has ended, and the guest runs in the destination.
pub(crate) fn settle(passed: &PassedParts) -> Result<(), RebootError> {
    let Some(tpm) = &passed.tpm else { return Ok(()) };
    let source = Process { pid: tpm.pid, started: tpm.started };
    kill(source, &tpm.socket.path)?;
    if let Some(path) = &tpm.pid_file {
        let emulators = emulators_at(&tpm.socket.waiting).map_err(RebootError::file(path))?;
        if let Some(successor) = emulators.iter().find(|process| **process != source) {
            pid_file::rewrite(path, successor.pid).map_err(RebootError::file(path))?;
        }
    }
    let PassedFile { path, waiting } = &tpm.socket;
    ignore_missing(fs::rename(waiting, path)).map_err(RebootError::file(path))?;
    let unlocked = tpm.lock.as_ref().map_or(Ok(()), |lock| ignore_missing(fs::remove_file(&lock.moved)));
    unlocked.map_err(RebootError::file(&tpm.socket.path))
}

/// Ends the emulator of a destination that has ended. Can be repeated.
pub(crate) fn end(passed: &PassedParts) -> Result<(), RebootError> {
    passed.tpm.as_ref().map_or(Ok(()), end_successor)
}

fn end_successor(tpm: &PassedTpm) -> Result<(), RebootError> {
    let failed = RebootError::file(&tpm.socket.waiting);
    let source = Process { pid: tpm.pid, started: tpm.started };
    for process in emulators_at(&tpm.socket.waiting).map_err(&failed)? {
        // The socket of the source's was there until an earlier replacement had ended.
        if process != source {
            kill(process, &tpm.socket.waiting)?;
        }
    }
    ignore_missing(fs::remove_file(&tpm.socket.waiting)).map_err(&failed)?;
    let locked = tpm.lock.as_ref().map_or(Ok(()), |lock| ignore_missing(fs::rename(&lock.moved, &lock.path)));
    locked.map_err(RebootError::file(&tpm.socket.path))
}

/// Kills an emulator: one that ends by itself removes its socket and its pid file, which may belong to another one then.
fn kill(process: Process, socket: &Path) -> Result<(), RebootError> {
    let ended = match process.kill() {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
        Ok(()) => process.wait_end(END_TIMEOUT),
    };
    match ended {
        Ok(true) => Ok(()),
        Ok(false) => Err(RebootError::file(socket)(io::Error::other("its process does not end"))),
        Err(e) => Err(RebootError::file(socket)(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn successor(line: &str) -> Result<Successor, String> {
        Successor::of(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_successor_has_the_same_settings_but_inherits_its_socket() {
        let line = "socket --ctrl type=unixio,path=/r/1-a-swtpm.sock,mode=0600 --tpmstate dir=/s/tpm2,mode=0600 \
                    --log file=/l/a.log,truncate --terminate --tpm2 --pid file=/r/a.pid --runas tss";
        let first = successor(line).unwrap();
        let expected =
            "socket --ctrl type=unixio,fd=3 --tpmstate dir=/s/tpm2,mode=0600 --log file=/l/a.log --terminate --tpm2";
        assert_eq!(first.arguments.join(" "), expected);
        assert_eq!((first.state_directory, first.pid_file), (Some("/s/tpm2".into()), Some("/r/a.pid".into())));
        assert_eq!(Successor::of(&first.arguments).unwrap().arguments, first.arguments);
    }

    #[test]
    fn the_socket_has_the_same_name_after_each_replacement() {
        let first = waiting_socket(Path::new("/r/1-a-swtpm.sock"));
        assert_eq!(first.waiting, Path::new("/r/1-a-swtpm.sock.rekindle"));
        assert_eq!(waiting_socket(&first.waiting), first);
        assert_eq!(first.path, Path::new("/r/1-a-swtpm.sock"));
    }

    #[test]
    fn an_emulator_that_cannot_be_started_twice_is_refused() {
        let refused = |line| successor(line).err().unwrap_or_else(|| panic!("accepted: {line}"));
        assert!(refused("chardev --ctrl type=unixio,path=/a").contains("no `swtpm socket`"));
        assert!(refused("socket --ctrl type=unixio,path=/a --key pwdfd=4").contains("--key pwdfd="));
        assert!(refused("socket --ctrl=type=unixio,path=/a --key file=/k,remove=true").contains("remove"));
        assert!(refused("socket --ctrl type=unixio,path=/a --server type=tcp,port=1").contains("--server"));
    }
}
