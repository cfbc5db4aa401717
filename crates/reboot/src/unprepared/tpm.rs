//! The emulator of a guest's TPM, a process of the program `swtpm`. It serves one QEMU, so the destination gets another one,
//! with the same settings and in the same surroundings.
//!
//! | step | emulator of the source | emulator of the destination |
//! |---|---|---|
//! | start of the destination | serves the source | waits with a socket of its own, and has not opened the TPM's state |
//! | pause | QEMU reads the state from it, with those of the devices | gets the state from QEMU, and writes it to its directory |
//! | the source is frozen, the guest runs in the destination | is killed, so that it removes and writes nothing | its socket and its pid file replace those of the source's |
//! | after a failure | continues, and writes its state at the next change | is killed, and its socket is removed |
//!
//! Both have the same directory. The second one opens the state there only when QEMU gives it one, and locks the file `.lock`
//! there then. The source's holds the lock of that file, which is therefore renamed meanwhile.
//!
//! libvirt's AppArmor profiles name the socket of the source's emulator. So the second one makes none: it inherits one.

use super::{UnpreparedError, pid_file};
use crate::error::RebootError;
use command_fds::FdMapping;
use rekindle_handover::Handover;
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::{Launch, ProcessEnvironment};
use rekindle_qemu::program::Program;
use rekindle_qemu::takeover_command::{CommandLine, Descriptor, ListenAddress, SourceDescriptor, open_descriptors};
use rekindle_vm::journal::{EmulatorProcess, MovedFile, PassedFile, PassedParts, PassedTpm};
use rekindle_vm::rundir::ignore_missing;
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
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
const NOT_REPEATABLE: [&str; 4] = ["fd", "pwdfd", "pwdfile-fd", "remove"];
/// Settings of the control channel about a socket that the emulator makes itself.
const OWN_SOCKET: [&str; 7] = ["type", "path", "mode", "uid", "gid", "fd", "clientfd"];
/// Options that mean the same for another emulator.
const KEPT_OPTIONS: [&str; 8] =
    ["--tpmstate", "--log", "--key", "--migration-key", "--migration", "--locality", "--seccomp", "--profile"];
const KEPT_SWITCHES: [&str; 3] = ["--tpm2", "--terminate", "-t"];
/// A process that puts itself into the background gets another number, which the journal would not name.
const DROPPED_SWITCHES: [&str; 2] = ["--daemon", "-d"];

/// The number at which the emulator inherits its socket.
const LISTENER: RawFd = 3;
/// The command that asks an emulator what it can do, and the length of the reply.
const GET_CAPABILITY: [u8; 4] = 1_u32.to_be_bytes();
const CAPABILITY_BYTES: usize = 8;

/// The emulator of the source's TPM, and what starts the one of the destination.
#[derive(Debug)]
pub(crate) struct TpmEmulator {
    process: Process,
    program: PathBuf,
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
        return Err("this path is relative: start QEMU and the emulator with the full path".into());
    }
    let process = match emulators_at(Path::new(server)).map_err(|e| e.to_string())?[..] {
        [process] => process,
        [] => return Err(format!("no process of the program {PROGRAM} listens there")),
        ref several => {
            let pids: Vec<String> = several.iter().map(|process| process.pid.to_string()).collect();
            return Err(format!("several processes listen there: {}; end the ones without a guest", pids.join(", ")));
        }
    };
    let program = Program::of(process).map_err(|e| e.to_string())?;
    if !program.start.is_file() {
        return Err(format!("its program {} does not exist any more: install it", program.start.display()));
    }
    let successor = Successor::of(&program.arguments)?;
    let environment = ProcessEnvironment::of(process).map_err(|e| e.to_string())?;
    let socket = waiting_socket(Path::new(server));
    let pid_file = successor.pid_file.unwrap_or_else(|| socket.path.with_extension("pid"));
    let passed = PassedTpm {
        source: EmulatorProcess { pid: process.pid, started: process.started },
        successor: None,
        pid_file: Some(pid_file).filter(|path| pid_file::names(path, process.pid)),
        lock: moved_lock(&successor.state_directory),
        socket,
    };
    let arguments = successor.arguments;
    Ok(TpmEmulator { process, program: program.start, environment, arguments, passed, connection: None })
}

/// Lists the emulators of this mount namespace whose socket was made at this path. It may have been renamed since.
fn emulators_at(path: &Path) -> io::Result<Vec<Process>> {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let own_namespace = namespace("self")?;
    let is_here = |open: &SourceDescriptor| match open {
        SourceDescriptor::Listener(ListenAddress::Unix(bound)) => Path::new(bound) == path,
        _ => false,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(process) = Process::of(pid) else { continue };
        let is_emulator = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == PROGRAM);
        // A process that cannot be inspected has ended.
        if is_emulator
            && namespace(&pid.to_string()).is_ok_and(|namespace| namespace == own_namespace)
            && open_descriptors(process).is_ok_and(|open| open.values().any(is_here))
        {
            found.push(process);
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
    state_directory: PathBuf,
}

impl Successor {
    fn of(arguments: &[String]) -> Result<Self, String> {
        if arguments.first().is_none_or(|kind| kind != "socket") {
            return Err(format!("it is no `{PROGRAM} socket`"));
        }
        let mut successor = Self { arguments: vec!["socket".into()], pid_file: None, state_directory: PathBuf::new() };
        let mut rest = arguments.iter().skip(1);
        while let Some(word) = rest.next() {
            if KEPT_SWITCHES.contains(&word.as_str()) {
                successor.arguments.push(word.clone());
                continue;
            }
            if DROPPED_SWITCHES.contains(&word.as_str()) {
                continue;
            }
            // `--ctrl VALUE` or `--ctrl=VALUE`
            let (option, value) = match word.split_once('=') {
                Some((option, value)) if option.starts_with("--") => (option, Some(value)),
                _ => (word.as_str(), rest.next().map(String::as_str)),
            };
            successor.add(option, Settings::parse(value.unwrap_or_default()))?;
        }
        if successor.state_directory.is_absolute() {
            return Ok(successor);
        }
        Err("its state is in no directory that is named by a full path (--tpmstate dir=)".into())
    }

    fn add(&mut self, option: &str, mut settings: Settings) -> Result<(), String> {
        match option {
            "--ctrl" => {
                settings.0.retain(|setting| !OWN_SOCKET.contains(&setting.split('=').next().unwrap_or_default()));
                settings.0.splice(0..0, ["type=unixio".to_owned(), format!("fd={LISTENER}")]);
                self.arguments.extend([option.to_owned(), settings.0.join(",")]);
                return Ok(());
            }
            // AppArmor may forbid it, and a process removes its pid file when it ends.
            "--pid" => {
                self.pid_file = settings.get("file").map(PathBuf::from);
                return Ok(());
            }
            // It is started as the user that the source's has changed to.
            "--runas" | "-r" => return Ok(()),
            kept if KEPT_OPTIONS.contains(&kept) => {}
            other => return Err(format!("its option {other} is not supported yet")),
        }
        if let Some(key) = NOT_REPEATABLE.iter().find(|key| settings.get(key).is_some()) {
            return Err(format!("{option} {key}=: another emulator cannot be started with it"));
        }
        if option == "--tpmstate" {
            let uri = settings.get("backend-uri").and_then(|uri| uri.strip_prefix("dir://"));
            self.state_directory = settings.get("dir").or(uri).map(PathBuf::from).unwrap_or_default();
        }
        settings.0.retain(|setting| option != "--log" || setting != "truncate");
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
    /// Starts the emulator of the destination, records it in the journal, and connects to it.
    pub(crate) fn start(&mut self, handover: &mut Handover) -> Result<(), RebootError> {
        let (waiting, MovedFile { path, moved }) = (&self.passed.socket.waiting, &self.passed.lock);
        // A power failure may have left them.
        ignore_missing(fs::remove_file(waiting)).map_err(RebootError::file(waiting))?;
        ignore_missing(fs::remove_file(moved)).map_err(RebootError::file(moved))?;
        ignore_missing(fs::rename(path, moved)).map_err(RebootError::file(path))?;
        handover.pass("replace.prepare.tpm-unlocked");
        let listener = self.listen().map_err(RebootError::file(waiting))?;
        let descriptors = self.descriptors(listener).map_err(RebootError::file(waiting))?;
        let arguments: Vec<OsString> = self.arguments.iter().map(OsString::from).collect();
        let launch = Launch { program: &self.program, arguments: &arguments, descriptors, lock: None };
        let Process { pid, started } = self.environment.spawn(launch).map_err(UnpreparedError::from)?;
        if let Some(tpm) = handover.journal.operation.passed.as_mut().and_then(|passed| passed.tpm.as_mut()) {
            tpm.successor = Some(EmulatorProcess { pid, started });
        }
        handover.journal.write().map_err(handover.file_error("operation.json"))?;
        let connected = connect(waiting).map_err(|source| {
            let command = format!("{} {}", self.program.display(), self.arguments.join(" "));
            UnpreparedError::Tpm { name: handover.name().into(), command, source }
        })?;
        self.connection = Some(connected);
        Ok(())
    }

    /// Makes the socket of the destination's emulator, with the owner and the mode of the source's.
    fn listen(&self) -> io::Result<OwnedFd> {
        let PassedFile { path, waiting } = &self.passed.socket;
        let listener = UnixListener::bind(waiting)?;
        // The directory belongs to another user, which could plant a link to a file of root.
        let made = File::from(open(waiting, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?);
        let (ours, source) = (made.metadata()?, fs::symlink_metadata(path)?);
        if !ours.file_type().is_socket() || ours.uid() != geteuid().as_raw() || !source.file_type().is_socket() {
            return Err(io::Error::other("another process has replaced this socket"));
        }
        let made = format!("/proc/self/fd/{}", made.as_raw_fd());
        fs::set_permissions(&made, Permissions::from_mode(source.mode() & 0o777))?;
        chown(&made, Some(source.uid()), Some(source.gid()))?;
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
pub(crate) fn pass(passed: &PassedParts) -> Result<(), RebootError> {
    let Some(tpm) = &passed.tpm else { return Ok(()) };
    end_source(passed)?;
    if let (Some(path), Some(successor)) = (&tpm.pid_file, tpm.successor) {
        pid_file::rewrite(path, successor.pid).map_err(RebootError::file(path))?;
    }
    let PassedFile { path, waiting } = &tpm.socket;
    ignore_missing(fs::rename(waiting, path)).map_err(RebootError::file(path))?;
    ignore_missing(fs::remove_file(&tpm.lock.moved)).map_err(RebootError::file(&tpm.lock.moved))
}

/// Ends the emulator of the source, whose state is older than that of the destination's. Can be repeated.
///
/// *Needs:* the guest does not return to the source.
pub(crate) fn end_source(passed: &PassedParts) -> Result<(), RebootError> {
    passed.tpm.as_ref().map_or(Ok(()), |tpm| kill(process(tpm.source), &tpm.socket.path))
}

/// Ends the emulator of a destination that has ended. Can be repeated.
pub(crate) fn end_successor(passed: &PassedParts) -> Result<(), RebootError> {
    let Some(tpm) = &passed.tpm else { return Ok(()) };
    let (source, waiting) = (process(tpm.source), &tpm.socket.waiting);
    // If Rekindle was killed when it had just started it, the journal does not name it.
    let found = match tpm.successor {
        Some(successor) => vec![process(successor)],
        None => emulators_at(waiting).map_err(RebootError::file(waiting))?,
    };
    for emulator in found {
        // The socket of the source's was there until an earlier replacement had ended.
        if emulator != source {
            kill(emulator, waiting)?;
        }
    }
    ignore_missing(fs::remove_file(waiting)).map_err(RebootError::file(waiting))?;
    let MovedFile { path, moved } = &tpm.lock;
    // If this operation has not moved it, a power failure has left it.
    let is_moved = tpm.successor.is_some() || !path.exists();
    if is_moved && source.is_alive() {
        return ignore_missing(fs::rename(moved, path)).map_err(RebootError::file(moved));
    }
    ignore_missing(fs::remove_file(moved)).map_err(RebootError::file(moved))
}

fn process(EmulatorProcess { pid, started }: EmulatorProcess) -> Process {
    Process { pid, started }
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
        let line = "socket --ctrl type=unixio,path=/r/1-a-swtpm.sock,mode=0600,terminate --tpmstate dir=/s/tpm2,mode=0600 \
                    --log file=/l/a.log,truncate --terminate --tpm2 -d --pid file=/r/a.pid --runas tss";
        let first = successor(line).unwrap();
        let expected = "socket --ctrl type=unixio,fd=3,terminate --tpmstate dir=/s/tpm2,mode=0600 --log file=/l/a.log --terminate --tpm2";
        assert_eq!(first.arguments.join(" "), expected);
        assert_eq!((first.state_directory, first.pid_file), ("/s/tpm2".into(), Some("/r/a.pid".into())));
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
        assert!(refused("socket --ctrl type=unixio,path=/a --flags not-need-init").contains("--flags"));
        assert!(refused("socket --ctrl type=unixio,path=/a --tpmstate dir=tpm").contains("full path"));
        assert!(refused("socket --ctrl type=unixio,path=/a --tpmstate backend-uri=file:///a").contains("full path"));
    }
}
