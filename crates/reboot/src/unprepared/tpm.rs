//! The emulator of a guest's TPM, a process of the program `swtpm`. It serves one QEMU, so the destination gets another one,
//! with the same settings and in the same surroundings.
//!
//! | step | emulator of the source | emulator of the destination |
//! |---|---|---|
//! | start of the destination | serves the source | waits at a socket of its own, and has not opened the TPM's state |
//! | pause | QEMU reads the state from it, with those of the devices | gets the state from QEMU, and writes it to its directory |
//! | end of the source | is killed, so that it removes and writes nothing | its socket and its pid file replace those of the source's |
//! | after a failure | continues, and writes its state at the next change | is killed, and its socket is removed |
//!
//! Both have the same directory. The second one opens the state there only when QEMU gives it one, and locks the file `.lock`
//! there then. The source's holds the lock of that file, which is therefore renamed meanwhile.

use super::{UnpreparedError, pid_file};
use crate::error::RebootError;
use command_fds::FdMapping;
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::{Launch, ProcessEnvironment};
use rekindle_qemu::takeover_command::{CommandLine, Descriptor};
use rekindle_vm::journal::{MovedFile, PassedFile, PassedParts, PassedTpm};
use rekindle_vm::rundir::ignore_missing;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Name of the program.
const PROGRAM: &str = "swtpm";
/// How long it may take to listen. It usually takes milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a killed emulator may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Part of the name of a file until the source has ended. The suffix stays, by which AppArmor's rules know the file.
const WAITING: &str = ".rekindle";
/// Settings that name a descriptor of the source's emulator, or a file that it has removed.
const NOT_REPEATABLE: [&str; 5] = ["fd", "clientfd", "pwdfd", "pwdfile-fd", "remove"];

/// The emulator of the source's TPM, and what starts the one of the destination.
#[derive(Debug)]
pub(crate) struct TpmEmulator {
    process: Process,
    binary: PathBuf,
    environment: ProcessEnvironment,
    /// Arguments of the destination's emulator.
    arguments: Vec<String>,
    pub passed: PassedTpm,
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
    let [(process, arguments)] = &processes_at(Path::new(server)).map_err(|e| e.to_string())?[..] else {
        return Err(format!("no process, or several, of the program {PROGRAM} listens there"));
    };
    let successor = Successor::of(arguments)?;
    let environment = ProcessEnvironment::of(*process).map_err(|e| e.to_string())?;
    let binary = fs::read_link(format!("/proc/{}/exe", process.pid)).map_err(|e| e.to_string())?;
    let next_to_socket = successor.socket.path.with_extension("pid");
    let is_written_by_manager = successor.pid_file.is_none() && pid_file::names(&next_to_socket, process.pid);
    let passed = PassedTpm {
        pid: process.pid,
        started: process.started,
        socket: successor.socket,
        pid_file: successor.pid_file,
        written_pid_file: is_written_by_manager.then_some(next_to_socket),
        lock: successor.state_directory.map(|directory| moved_lock(&directory)),
    };
    Ok(TpmEmulator { process: *process, binary, environment, arguments: successor.arguments, passed })
}

/// Lists the emulators that were started to listen at `socket`, with their arguments.
fn processes_at(socket: &Path) -> io::Result<Vec<(Process, Vec<String>)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let (Ok(process), Ok(line)) = (Process::of(pid), fs::read(format!("/proc/{pid}/cmdline"))) else { continue };
        let words: Vec<String> =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let Some((program, arguments)) = words.strip_suffix(&[String::new()]).and_then(<[_]>::split_first) else {
            continue;
        };
        let is_emulator = Path::new(program).file_name().is_some_and(|name| name == PROGRAM);
        if is_emulator && Successor::of(arguments).is_ok_and(|successor| successor.listens_at == socket) {
            found.push((process, arguments.to_vec()));
        }
    }
    Ok(found)
}

fn moved_lock(state_directory: &Path) -> MovedFile {
    MovedFile { path: state_directory.join(".lock"), moved: state_directory.join(".lock.rekindle") }
}

/// What the arguments of an emulator state about its successor.
struct Successor {
    listens_at: PathBuf,
    arguments: Vec<String>,
    socket: PassedFile,
    pid_file: Option<PassedFile>,
    state_directory: Option<PathBuf>,
}

impl Successor {
    fn of(arguments: &[String]) -> Result<Self, String> {
        if arguments.first().is_none_or(|kind| kind != "socket") {
            return Err(format!("it is no `{PROGRAM} socket`"));
        }
        let (mut rewritten, mut socket, mut pid_file) = (Vec::new(), None, None);
        let (mut listens_at, mut state_directory) = (None, None);
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
            let Some(value) = value else {
                rewritten.push(word.clone());
                continue;
            };
            let mut settings = Settings::parse(&value);
            if let Some(key) = NOT_REPEATABLE.iter().find(|key| settings.get(key).is_some()) {
                return Err(format!("{option} {key}=: another emulator cannot be started with it"));
            }
            match option {
                "--ctrl" => {
                    listens_at = settings.get("path").map(PathBuf::from);
                    socket = settings.rename_file("path");
                }
                "--pid" => pid_file = settings.rename_file("file"),
                "--tpmstate" => {
                    let uri = settings.get("backend-uri").and_then(|uri| uri.strip_prefix("dir://"));
                    state_directory = settings.get("dir").or(uri).map(PathBuf::from);
                }
                "--log" => settings.0.retain(|setting| setting != "truncate"),
                // It is started as the user that the source's has changed to.
                "--runas" | "-r" => continue,
                _ => {}
            }
            rewritten.extend([option.to_owned(), settings.0.join(",")]);
        }
        let (Some(listens_at), Some(socket)) = (listens_at, socket) else {
            return Err("it has no Unix socket with a path (--ctrl type=unixio,path=...)".into());
        };
        Ok(Self { listens_at, arguments: rewritten, socket, pid_file, state_directory })
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

    /// Lets a setting name another file, for the time in which two emulators run.
    fn rename_file(&mut self, key: &str) -> Option<PassedFile> {
        let path = PathBuf::from(self.get(key)?);
        let extension = path.extension().map(|text| format!(".{}", text.to_string_lossy())).unwrap_or_default();
        let stem = path.file_stem()?.to_string_lossy().into_owned();
        // An earlier replacement has renamed it.
        let stem = stem.strip_suffix(WAITING).unwrap_or(&stem);
        let path = path.with_file_name(format!("{stem}{extension}"));
        let waiting = path.with_file_name(format!("{stem}{WAITING}{extension}"));
        let setting = self.0.iter_mut().find(|setting| setting.starts_with(&format!("{key}=")))?;
        *setting = format!("{key}={}", waiting.display());
        Some(PassedFile { path, waiting })
    }
}

impl TpmEmulator {
    /// Starts the emulator of the destination.
    pub(crate) fn start(&self, name: &str) -> Result<(), RebootError> {
        let PassedFile { path, waiting } = &self.passed.socket;
        let failed = |why: String| UnpreparedError::Tpm { name: name.into(), why };
        end_successor(&self.passed)?;
        if let Some(MovedFile { path, moved }) = &self.passed.lock {
            ignore_missing(fs::rename(path, moved)).map_err(RebootError::file(path))?;
        }
        let arguments: Vec<OsString> = self.arguments.iter().map(OsString::from).collect();
        let inherited = |number| Ok(FdMapping { parent_fd: descriptor::take(self.process, number)?, child_fd: number });
        let descriptors: io::Result<Vec<FdMapping>> = [1, 2].into_iter().map(inherited).collect();
        let descriptors = descriptors.map_err(|e| failed(e.to_string()))?;
        let launch = Launch { program: &self.binary, arguments: &arguments, descriptors, lock: None };
        self.environment.spawn(launch).map_err(UnpreparedError::from)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while !waiting.exists() {
            if Instant::now() >= deadline {
                let what = self.arguments.join(" ");
                return Err(failed(format!("it does not listen at {}; see its log: {what}", waiting.display())).into());
            }
            thread::sleep(POLL_INTERVAL);
        }
        // Its manager may have changed them after the start.
        let owned = fs::symlink_metadata(path).and_then(|socket| {
            fs::set_permissions(waiting, Permissions::from_mode(socket.mode() & 0o7777))?;
            chown(waiting, Some(socket.uid()), Some(socket.gid()))
        });
        owned.map_err(RebootError::file(path))
    }

    /// Connects to the emulator of the destination.
    pub(crate) fn connect(&self) -> io::Result<OwnedFd> {
        Ok(UnixStream::connect(&self.passed.socket.waiting)?.into())
    }
}

/// Ends the emulator of the source, and gives that of the destination its place. Can be repeated.
///
/// *Needs:* the source is frozen, or has ended, and the guest runs in the destination.
pub(crate) fn settle(passed: &PassedParts) -> Result<(), RebootError> {
    let Some(tpm) = &passed.tpm else { return Ok(()) };
    let source = Process { pid: tpm.pid, started: tpm.started };
    kill(source, &tpm.socket.path)?;
    if let Some(path) = &tpm.written_pid_file {
        let running = processes_at(&tpm.socket.waiting).map_err(RebootError::file(path))?;
        if let Some((process, _)) = running.iter().find(|(process, _)| *process != source) {
            pid_file::rewrite(path, process.pid).map_err(RebootError::file(path))?;
        }
    }
    for file in [Some(&tpm.socket), tpm.pid_file.as_ref()].into_iter().flatten() {
        ignore_missing(fs::rename(&file.waiting, &file.path)).map_err(RebootError::file(&file.path))?;
    }
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
    for (process, _) in processes_at(&tpm.socket.waiting).map_err(&failed)? {
        // The source's listened there before an earlier replacement had ended.
        if process != source {
            kill(process, &tpm.socket.waiting)?;
        }
    }
    for file in [Some(&tpm.socket), tpm.pid_file.as_ref()].into_iter().flatten() {
        ignore_missing(fs::remove_file(&file.waiting)).map_err(RebootError::file(&file.waiting))?;
    }
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
    fn only_the_files_of_one_process_are_renamed_and_named_as_before_by_the_next_replacement() {
        let line = "socket --ctrl type=unixio,path=/r/1-a-swtpm.sock,mode=0600 --tpmstate dir=/s/tpm2,mode=0600 \
                    --log file=/l/a.log,truncate --terminate --tpm2 --pid file=/r/1-a-swtpm.pid";
        let first = successor(line).unwrap();
        let expected = "socket --ctrl type=unixio,path=/r/1-a-swtpm.rekindle.sock,mode=0600 --tpmstate dir=/s/tpm2,mode=0600 \
                        --log file=/l/a.log --terminate --tpm2 --pid file=/r/1-a-swtpm.rekindle.pid";
        assert_eq!(first.arguments.join(" "), expected);
        assert_eq!(first.listens_at, Path::new("/r/1-a-swtpm.sock"));
        assert_eq!(first.state_directory, Some("/s/tpm2".into()));
        let second = Successor::of(&first.arguments).unwrap();
        assert_eq!(second.arguments, first.arguments);
        assert_eq!((second.socket, second.pid_file), (first.socket.clone(), first.pid_file));
        assert_eq!(first.socket.path, Path::new("/r/1-a-swtpm.sock"));
    }

    #[test]
    fn an_emulator_that_cannot_be_started_twice_is_refused() {
        let refused = |line| successor(line).err().unwrap_or_else(|| panic!("accepted: {line}"));
        assert!(refused("chardev --ctrl type=unixio,path=/a").contains("no `swtpm socket`"));
        assert!(refused("socket --ctrl type=unixio,fd=3").contains("fd="));
        assert!(refused("socket --ctrl type=unixio,path=/a --key pwdfd=4").contains("--key pwdfd="));
        assert!(refused("socket --ctrl=type=unixio,path=/a --key file=/k,remove=true").contains("remove"));
        assert!(refused("socket --ctrl type=unixio,path=/a --server type=tcp,port=1").contains("--server"));
        assert!(refused("socket --ctrl type=tcp,port=2322").contains("no Unix socket"));
    }
}
