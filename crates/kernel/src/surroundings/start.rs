//! Forks, enters the surroundings, executes the program, and reports the step that failed.

use super::action::{Action, Step};
use super::{EnvironmentError, ProcessEnvironment};
use crate::lockfile::InheritedLock;
use crate::process::Process;
use crate::spawn::{detach, disown};
use command_fds::FdMapping;
use rustix::pipe::PipeFlags;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::ptr;
use std::sync::Arc;

/// The program that is to be started.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Inside the root directory of the surroundings.
    pub program: &'a Path,
    /// Without the name of the program.
    pub arguments: &'a [OsString],
    /// Descriptors that the program inherits.
    pub descriptors: Vec<FdMapping>,
    /// A file outside of the surroundings whose lock the program holds until it ends, as by
    /// [`crate::lockfile::hold`].
    pub lock: Option<&'a Path>,
}

/// Exit status of a child that could not execute the program. Not evaluated: the record has the cause.
const NOT_EXECUTED: libc::c_int = 127;

/// What the child writes into the pipe if a step fails: the index of the action (or their number, for the exec), and
/// errno.
struct FailureRecord {
    index: u32,
    errno: i32,
}

impl FailureRecord {
    const BYTES: usize = 8;

    fn to_bytes(&self) -> [u8; Self::BYTES] {
        ((u64::from(self.index) << 32) | u64::from(self.errno.cast_unsigned())).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = u64::from_le_bytes(bytes);
        let half = |shift: u32| u32::try_from((word >> shift) & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Self { index: half(32), errno: half(0).cast_signed() }
    }
}

pub(super) fn start(environment: &ProcessEnvironment, launch: Launch<'_>) -> Result<Process, EnvironmentError> {
    let (program, pid) = (launch.program, environment.process.pid);
    let failed = |step, source| EnvironmentError::Start { program: program.to_owned(), pid, step, source };
    let fork_failed = |e| failed(Step::Fork, e);
    let exec = ExecArguments::new(&launch, &environment.variables).map_err(|e| failed(Step::Execute, e))?;
    let first_spare = first_spare_number(&launch.descriptors)?;
    let actions = actions(environment, launch, first_spare).map_err(|(step, e)| failed(step, e))?;
    let actions: Arc<[Action]> = actions.into();

    let (record, write_end) = report_pipe(first_spare).map_err(fork_failed)?;
    let child = fork(actions.clone(), exec, write_end).map_err(fork_failed)?;
    match read_failure(record) {
        Ok(None) => {
            let process = Process::of(child.id()).map_err(fork_failed);
            disown(child);
            process
        }
        Ok(Some(FailureRecord { index, errno })) => {
            reap(child);
            let step = actions.get(index as usize).map_or(Step::Execute, |action| action.step.clone());
            Err(failed(step, io::Error::from_raw_os_error(errno)))
        }
        Err(e) => {
            reap(child);
            Err(fork_failed(e))
        }
    }
}

/// Ends the child, if it has not ended by itself.
fn reap(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Returns the actions of the child in their order: what needs the caller's files, privileges and namespaces comes
/// before what takes them away.
fn actions(
    environment: &ProcessEnvironment,
    launch: Launch<'_>,
    first_spare: RawFd,
) -> Result<Vec<Action>, (Step, io::Error)> {
    let mut actions = vec![Action::new(Step::CloseDescriptors, close_all_at_exec)];
    // The lock file, the cgroups and `/proc` are reached by the paths of the caller, so before the namespaces.
    if let Some(path) = launch.lock {
        let step = Step::Lock(path.to_owned());
        let lock = InheritedLock::new(path).map_err(|e| (step.clone(), e))?;
        // Above the report pipe too, which is at `first_spare` or later and stays open.
        actions.push(Action::new(step, move || lock.take(first_spare)));
    }
    if let Some(label) = &environment.label {
        actions.push(label.action());
    }
    for place in &environment.cgroups {
        actions.push(place.action()?);
    }
    environment.limits.add_actions(&mut actions);
    environment.scheduling.add_actions(&mut actions);
    environment.location.add_actions(&mut actions);
    for FdMapping { parent_fd, child_fd } in launch.descriptors {
        let step = Step::Descriptor(child_fd);
        let file = above(&parent_fd, first_spare).map_err(|e| (step.clone(), e))?;
        actions.push(Action::new(step, move || put(&file, child_fd)));
    }
    environment.credentials.add_actions(&mut actions);
    Ok(actions)
}

/// Returns the first number above all that the program inherits.
fn first_spare_number(descriptors: &[FdMapping]) -> Result<RawFd, EnvironmentError> {
    let mut numbers: Vec<_> = descriptors.iter().map(|mapping| mapping.child_fd).collect();
    numbers.sort_unstable();
    if let Some(pair) = numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(EnvironmentError::DuplicateDescriptor { number: pair[0] });
    }
    Ok(numbers.last().copied().unwrap_or_default().max(libc::STDERR_FILENO) + 1)
}

/// Returns read and write end of a pipe. The write end has a number that no inherited descriptor gets.
fn report_pipe(first_spare: RawFd) -> io::Result<(OwnedFd, OwnedFd)> {
    let (record, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    Ok((record, above(&write_end, first_spare)?))
}

fn above(file: &OwnedFd, minimum: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, minimum)?)
}

/// Marks all descriptors but the standard ones as closed at exec. Those that the program inherits are made afterwards.
fn close_all_at_exec() -> io::Result<()> {
    let first = libc::STDERR_FILENO + 1;
    // SAFETY: the call takes numbers only, and closes nothing now.
    let marked = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn put(file: &OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: runs in the child, where nothing but the exec, which closes them, uses the descriptors below the spare
    // numbers.
    let put = unsafe { libc::dup2(file.as_raw_fd(), number) };
    if put < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Program, arguments and variables in the form that `execve` takes.
struct ExecArguments {
    program: CString,
    arguments: PointerArray,
    variables: PointerArray,
}

impl ExecArguments {
    fn new(launch: &Launch<'_>, variables: &[OsString]) -> io::Result<Self> {
        let program = CString::new(launch.program.as_os_str().as_bytes())?;
        let strings = |texts: &[OsString]| -> Result<Vec<_>, _> {
            texts.iter().map(|text| CString::new(text.as_bytes())).collect()
        };
        let mut arguments = strings(launch.arguments)?;
        arguments.insert(0, program.clone());
        Ok(Self { program, arguments: PointerArray::new(arguments), variables: PointerArray::new(strings(variables)?) })
    }

    /// Returns only on errors.
    fn execute(&self) -> io::Error {
        let (arguments, variables) = (self.arguments.pointers.as_ptr(), self.variables.pointers.as_ptr());
        // SAFETY: the strings end with a zero byte and the arrays with a null pointer; both live as long as `self`.
        unsafe { libc::execve(self.program.as_ptr(), arguments, variables) };
        io::Error::last_os_error()
    }
}

/// Strings and the array of pointers to them, which ends with a null pointer.
struct PointerArray {
    _strings: Vec<CString>,
    pointers: Vec<*const libc::c_char>,
}

// SAFETY: the pointers lead to the heap memory of `_strings`, which moves and changes with neither.
unsafe impl Send for PointerArray {}
// SAFETY: as above.
unsafe impl Sync for PointerArray {}

impl PointerArray {
    fn new(strings: Vec<CString>) -> Self {
        let pointers = strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect();
        Self { _strings: strings, pointers }
    }
}

/// Starts the child. The closure never returns to the standard library, whose own report of errors may go to a
/// descriptor that was replaced by an inherited one.
fn fork(actions: Arc<[Action]>, exec: ExecArguments, write_end: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(std::ffi::OsStr::from_bytes(exec.program.as_bytes()));
    detach(&mut command);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. Actions make no other, by contract, and
    // neither do the calls of `enter`; all memory was allocated before.
    unsafe { command.pre_exec(move || enter(&actions, &exec, &write_end)) };
    // The closure owns the write end, and the command the closure: with it the caller's copy is closed.
    command.spawn()
}

/// Runs in the child.
fn enter(actions: &[Action], exec: &ExecArguments, write_end: &OwnedFd) -> ! {
    let mut index = 0;
    let mut run = || {
        for action in actions {
            if let Err(e) = (action.run)() {
                return e;
            }
            index += 1;
        }
        exec.execute()
    };
    let errno = run().raw_os_error().unwrap_or(libc::EIO);
    let _ = rustix::io::write(write_end, &FailureRecord { index, errno }.to_bytes());
    // SAFETY: ends the child without running destructors or exit handlers of the parent.
    unsafe { libc::_exit(NOT_EXECUTED) }
}

/// Waits until the child executes its program, or ends. Returns the step that failed.
fn read_failure(pipe: OwnedFd) -> io::Result<Option<FailureRecord>> {
    let mut bytes = Vec::new();
    File::from(pipe).take(FailureRecord::BYTES as u64).read_to_end(&mut bytes)?;
    match <[u8; FailureRecord::BYTES]>::try_from(bytes) {
        Ok(bytes) => Ok(Some(FailureRecord::from_bytes(bytes))),
        Err(bytes) if bytes.is_empty() => Ok(None),
        Err(bytes) => Err(io::Error::other(format!("the child wrote {} bytes", bytes.len()))),
    }
}
