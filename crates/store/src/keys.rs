//! Reads the keys of an owner: from a file that only the owner can read, or from the output of a command, e.g. of a key
//! management service.

use crate::sealing::{KEY_LEN, KeyId, KeyRing, MasterKey, random};
use rekindle_kernel::spawn::die_with_starter;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, geteuid, kill_process_group, waitid};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Limit of the bytes of a key file: about 900 keys.
const MAX_KEY_FILE_BYTES: u64 = 64 << 10;
/// Limit of the time that a key command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is checked whether a key command has ended that has closed its output.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Where the keys of an owner are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    File(PathBuf),
    /// A command for `/bin/sh` that prints the content of a key file.
    Command(String),
}

/// Why the keys of an owner cannot be read. The messages contain nothing of a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(
        "there is no key file {}; copy it from a host that has it, or create one for a new store: rekindle store new-key {}",
        path.display(), path.display()
    )]
    Missing { path: PathBuf },
    #[error("the key file {} cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the key file {} is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "the key file {} can be read by other users than its owner (mode {:03o}); correct that: chmod 600 {}; if others may \
         have read it, create a new key and a new store",
        path.display(), mode & 0o777, path.display()
    )]
    ReadableByOthers { path: PathBuf, mode: u32 },
    #[error(
        "the key file {} belongs to user {owner}, which could replace it; correct that: chown {} {}",
        path.display(), geteuid().as_raw(), path.display()
    )]
    OfOtherUser { path: PathBuf, owner: u32 },
    #[error("{from}: longer than the {MAX_KEY_FILE_BYTES} bytes that keys can have")]
    TooLong { from: String },
    #[error(
        "{from}, line {line}: not a key; a key is {} hexadecimal digits on a line of its own (rekindle store new-key)",
        2 * KEY_LEN
    )]
    NotAKey { from: String, line: usize },
    #[error("{from}: there is no key in it; create one: rekindle store new-key")]
    Empty { from: String },
    /// The text of a key command is in no error: it may contain a password.
    #[error("the key command (--key-command) cannot be run")]
    Start {
        #[source]
        source: io::Error,
    },
    #[error("the key command (--key-command) has failed: {status}")]
    Failed { status: ExitStatus },
    #[error("the key command (--key-command) has not ended within {} s and was killed", after.as_secs())]
    TimedOut { after: Duration },
}

impl KeyError {
    /// Returns whether another attempt may succeed without a change by the operator: a key service that cannot be reached.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Start { .. } | Self::Failed { .. } | Self::TimedOut { .. })
    }
}

/// The keys that this process has read.
static KEYS: LazyLock<Mutex<HashMap<KeySource, Arc<KeyRing>>>> = LazyLock::new(Mutex::default);

impl KeySource {
    /// Returns the keys. They are read once by each process, so that a key service is asked once for each command, and must
    /// not be reachable all the time.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn keys(&self) -> Result<Arc<KeyRing>, KeyError> {
        let mut keys = KEYS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = keys.get(self) {
            return Ok(known.clone());
        }
        let read = Arc::new(self.read()?);
        keys.insert(self.clone(), read.clone());
        Ok(read)
    }

    /// Reads the keys.
    ///
    /// # Errors
    /// [`KeyError`].
    fn read(&self) -> Result<KeyRing, KeyError> {
        match self {
            Self::File(path) => parse(&read_file(path)?, &format!("the key file {}", path.display())),
            Self::Command(command) => {
                let output = run(command, COMMAND_TIMEOUT)?;
                parse(&output, "the output of the key command (--key-command)")
            }
        }
    }

    /// Makes the path of a file independent of the working directory.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::File(path) => Self::File(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
            Self::Command(command) => Self::Command(command.clone()),
        }
    }
}

/// A new key, as a line of a key file.
pub struct NewKey {
    pub id: KeyId,
    /// The key. Secret.
    pub line: Zeroizing<String>,
}

impl NewKey {
    /// # Errors
    /// The kernel provides no random numbers.
    pub fn generate() -> io::Result<Self> {
        let bytes: Zeroizing<[u8; KEY_LEN]> = Zeroizing::new(random()?);
        let mut line = Zeroizing::new(String::with_capacity(2 * KEY_LEN + 1));
        for byte in *bytes {
            let _ = write!(line, "{byte:02x}");
        }
        line.push('\n');
        Ok(Self { id: MasterKey::new(*bytes).id(), line })
    }
}

fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => KeyError::Missing { path: path.to_owned() },
        _ => KeyError::Read { path: path.to_owned(), source },
    };
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let path = || path.to_owned();
    if !metadata.is_file() {
        return Err(KeyError::NotAFile { path: path() });
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(KeyError::ReadableByOthers { path: path(), mode: metadata.mode() });
    }
    let owner = metadata.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(KeyError::OfOtherUser { path: path(), owner });
    }
    read_limited(file).map_err(failed)
}

/// Runs a key command, and returns its output: one byte more than the limit if it is too long. None of the command's processes
/// remains, those excepted that have left its process group.
fn run(command: &str, timeout: Duration) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let failed = |source| KeyError::Start { source };
    let deadline = Instant::now() + timeout;
    let mut shell = Command::new("/bin/sh");
    // Relative paths in it would work only sometimes: other processes of the VM run it, too, in other directories.
    shell.args(["-c", command]).current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = die_with_starter(&mut shell).spawn().map_err(failed)?;
    let output = output_of(&mut child, deadline);
    let status = end_group(&mut child).map_err(failed)?;
    match output.map_err(failed)? {
        None => Err(KeyError::TimedOut { after: timeout }),
        Some(content) if content.len() as u64 > MAX_KEY_FILE_BYTES || status.success() => Ok(content),
        Some(_) => Err(KeyError::Failed { status }),
    }
}

/// Returns the output of a command when it has ended, or when the output is too long; `None` at the deadline.
fn output_of(child: &mut Child, deadline: Instant) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let (send_output, output) = mpsc::channel();
    let stdout = child.stdout.take();
    // The thread ends when the command, and all processes that have its output, have ended or are killed.
    let reader = thread::Builder::new().name("key command".into()).spawn(move || {
        let read = stdout.map_or_else(|| Ok(Zeroizing::default()), read_limited);
        let _ = send_output.send(read);
    })?;
    let Ok(content) = output.recv_timeout(deadline.saturating_duration_since(Instant::now())) else { return Ok(None) };
    // A process that confines itself must have no other thread.
    let _ = reader.join();
    let content = content?;
    while content.len() as u64 <= MAX_KEY_FILE_BYTES && !has_ended(child)? {
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(END_CHECK_INTERVAL);
    }
    Ok(Some(content))
}

/// Reads one byte more than the limit, at most, into a buffer that is never moved: a copy would not be erased.
fn read_limited(from: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut content = Zeroizing::new(Vec::with_capacity(MAX_KEY_FILE_BYTES as usize + 1));
    let mut from = from.take(MAX_KEY_FILE_BYTES + 1);
    let mut part = Zeroizing::new([0; 4096]);
    loop {
        match from.read(&mut *part) {
            Ok(0) => return Ok(content),
            Ok(count) => content.extend_from_slice(part.get(..count).unwrap_or_default()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Returns whether a child has ended. Its number stays its own until it is waited for.
fn has_ended(child: &Child) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(pid), options)?.is_some())
}

/// Kills a command, which has not been waited for, and all processes of its group. Returns the status with which it ended.
fn end_group(child: &mut Child) -> io::Result<ExitStatus> {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    child.wait()
}

/// Parses the content of a key file: a key on each line; empty lines and comments (`#`) are skipped.
fn parse(content: &[u8], from: &str) -> Result<KeyRing, KeyError> {
    if content.len() as u64 > MAX_KEY_FILE_BYTES {
        return Err(KeyError::TooLong { from: from.to_owned() });
    }
    let mut keys = Vec::new();
    for (number, line) in content.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let key = parse_key(line).ok_or_else(|| KeyError::NotAKey { from: from.to_owned(), line: number + 1 })?;
        keys.push(MasterKey::new(key));
    }
    KeyRing::new(keys).ok_or_else(|| KeyError::Empty { from: from.to_owned() })
}

fn parse_key(line: &[u8]) -> Option<[u8; KEY_LEN]> {
    let (pairs, rest) = line.as_chunks::<2>();
    if pairs.len() != KEY_LEN || !rest.is_empty() {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut key = [0; KEY_LEN];
    for (byte, [high, low]) in key.iter_mut().zip(pairs) {
        *byte = (digit(*high)? * 16 + digit(*low)?) as u8;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn file(dir: &tempfile::TempDir, mode: u32, content: &str) -> KeySource {
        let path = dir.path().join("keys");
        let _ = fs::remove_file(&path);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        KeySource::File(path)
    }

    #[test]
    fn a_new_key_is_read_from_a_file_and_from_a_command() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = [(), ()].map(|()| NewKey::generate().unwrap());
        assert_ne!(*first.line, *second.line);
        let source = file(&dir, 0o600, &format!("# first\n{}\n  {}", *first.line, *second.line));
        let KeySource::File(path) = &source else { unreachable!() };
        let command = KeySource::Command(format!("cat {}", path.display()));
        for source in [&source, &command] {
            let ring = format!("{:?}", source.read().unwrap());
            assert_eq!(ring, format!("KeyRing([MasterKey({}), MasterKey({})])", first.id, second.id));
        }
    }

    #[test]
    fn a_key_file_that_others_can_read_is_rejected_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let key = NewKey::generate().unwrap().line;
        for mode in [0o640, 0o604, 0o620, 0o602] {
            let e = file(&dir, mode, &key).read().unwrap_err();
            assert!(e.to_string().contains("chmod 600") && !e.to_string().contains(key.trim()), "{e}");
        }
        file(&dir, 0o400, &key).read().unwrap();
    }

    #[test]
    fn what_is_no_key_is_named_without_being_shown() {
        let dir = tempfile::tempdir().unwrap();
        let key = NewKey::generate().unwrap().line.to_string();
        for bad in [&key[1..], &format!("0{key}"), "password", &format!("zz{}", &key[2..])] {
            let e = file(&dir, 0o600, &format!("{key}{bad}")).read().unwrap_err();
            assert!(matches!(&e, KeyError::NotAKey { line: 2, .. }), "{e}");
            assert!(!e.to_string().contains(bad.trim()), "{e}");
        }
        assert!(matches!(file(&dir, 0o600, "# none\n\n").read(), Err(KeyError::Empty { .. })));
        assert!(matches!(file(&dir, 0o600, &key.repeat(2000)).read(), Err(KeyError::TooLong { .. })));
        assert!(matches!(KeySource::File(dir.path().into()).read(), Err(KeyError::NotAFile { .. })));
        let e = KeySource::File(dir.path().join("none")).read().unwrap_err();
        assert!(matches!(&e, KeyError::Missing { .. }) && e.to_string().contains("rekindle store new-key"), "{e}");
    }

    #[test]
    fn a_key_command_is_limited_in_output_and_time_and_leaves_no_process() {
        let endless = KeySource::Command("yes".into());
        assert!(matches!(endless.read(), Err(KeyError::TooLong { .. })));
        let e = KeySource::Command("exit 3".into()).read().unwrap_err();
        assert!(matches!(&e, KeyError::Failed { status, .. } if status.code() == Some(3)), "{e}");
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        // The process in the background keeps the output open.
        let command = format!("sleep 1000 & echo $! > {}; wait", pid_file.display());
        let e = run(&command, Duration::from_millis(300)).unwrap_err();
        assert!(matches!(e, KeyError::TimedOut { .. }), "{e}");
        let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        // It is dead: it has no command line any more, whether its parent has waited for it or not.
        let is_dead = || fs::read(format!("/proc/{pid}/cmdline")).map_or(true, |command| command.is_empty());
        while !is_dead() {
            thread::yield_now();
        }
        // A process that a successful command leaves behind.
        let command = format!("sleep 1000 >/dev/null & echo $! > {}", pid_file.display());
        assert!(run(&command, COMMAND_TIMEOUT).unwrap().is_empty());
        let left: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        while !fs::read(format!("/proc/{left}/cmdline")).map_or(true, |command| command.is_empty()) {
            thread::yield_now();
        }
        assert_eq!(run("pwd", COMMAND_TIMEOUT).unwrap().as_slice(), b"/\n");
        // A command that closes its output and continues.
        let e = run("exec >&-; sleep 1000", Duration::from_millis(300)).unwrap_err();
        assert!(matches!(e, KeyError::TimedOut { .. }), "{e}");
    }
}
