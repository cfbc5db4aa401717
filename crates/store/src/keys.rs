//! Reads the keys of an owner: from a file that only the owner can read, or from the output of a command, e.g. of a key
//! management service.

use crate::sealing::{KEY_LEN, KeyId, KeyRing, MasterKey, random};
use rustix::process::{Pid, Signal, geteuid, kill_process_group};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Limit of the bytes of a key file: about 900 keys.
const MAX_KEY_FILE_BYTES: u64 = 64 << 10;
/// Limit of the time that a key command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is checked whether a key command has ended that has closed its output.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Where the keys of an owner are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    File(PathBuf),
    /// A command for `/bin/sh` that prints the content of a key file.
    Command(String),
}

/// Why the keys of an owner cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("the key file {} cannot be read; create one: rekindle store new-key {}", path.display(), path.display())]
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
    #[error("the key command `{command}` cannot be run")]
    Start {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error("the key command `{command}` has failed: {status}")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("the key command `{command}` has not ended within {} s and was killed", after.as_secs())]
    TimedOut { command: String, after: Duration },
}

impl KeySource {
    /// Reads the keys.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn read(&self) -> Result<KeyRing, KeyError> {
        match self {
            Self::File(path) => parse(&read_file(path)?, &format!("the key file {}", path.display())),
            Self::Command(command) => {
                let output = run(command, COMMAND_TIMEOUT)?;
                parse(&output, &format!("the output of the key command `{command}`"))
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
#[derive(Debug)]
pub struct NewKey {
    pub id: KeyId,
    /// The key. Secret.
    pub line: String,
}

impl NewKey {
    /// # Errors
    /// The kernel provides no random numbers.
    pub fn generate() -> io::Result<Self> {
        let bytes: [u8; KEY_LEN] = random()?;
        let mut line = String::with_capacity(2 * KEY_LEN + 1);
        for byte in bytes {
            let _ = write!(line, "{byte:02x}");
        }
        line.push('\n');
        Ok(Self { id: MasterKey::new(bytes).id(), line })
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, KeyError> {
    let failed = |source| KeyError::Read { path: path.to_owned(), source };
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
    let mut content = Vec::new();
    file.take(MAX_KEY_FILE_BYTES + 1).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// Runs a key command, and returns its output: one byte more than the limit if it is too long.
fn run(command: &str, timeout: Duration) -> Result<Vec<u8>, KeyError> {
    let failed = |source| KeyError::Start { command: command.to_owned(), source };
    let started_at = Instant::now();
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(failed)?;
    let (send_output, output) = mpsc::channel();
    let stdout = child.stdout.take();
    // The thread ends when the command, and all processes that have its output, have ended or are killed.
    let reader = thread::Builder::new().name("key command".into()).spawn(move || {
        let mut content = Vec::new();
        let read = stdout.map_or(Ok(0), |stdout| stdout.take(MAX_KEY_FILE_BYTES + 1).read_to_end(&mut content));
        let _ = send_output.send(read.map(|_| content));
    });
    if let Err(e) = reader {
        kill(&mut child);
        return Err(failed(e));
    }
    let content = match output.recv_timeout(timeout) {
        Ok(Ok(content)) => content,
        Ok(Err(e)) => {
            kill(&mut child);
            return Err(failed(e));
        }
        Err(_) => {
            kill(&mut child);
            return Err(KeyError::TimedOut { command: command.to_owned(), after: timeout });
        }
    };
    if content.len() as u64 > MAX_KEY_FILE_BYTES {
        kill(&mut child);
        return Ok(content);
    }
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(content),
            Ok(Some(status)) => return Err(KeyError::Failed { command: command.to_owned(), status }),
            Ok(None) if started_at.elapsed() < timeout => thread::sleep(END_CHECK_INTERVAL),
            Ok(None) => {
                kill(&mut child);
                return Err(KeyError::TimedOut { command: command.to_owned(), after: timeout });
            }
            Err(e) => {
                kill(&mut child);
                return Err(failed(e));
            }
        }
    }
}

/// Kills a command, which has not been waited for, and all processes that it has started.
fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
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
        assert_ne!(first.line, second.line);
        let source = file(&dir, 0o600, &format!("# first\n{}\n  {}", first.line, second.line));
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
        let key = NewKey::generate().unwrap().line;
        for bad in [&key[1..], &format!("0{key}"), "password", &format!("zz{}", &key[2..])] {
            let e = file(&dir, 0o600, &format!("{key}{bad}")).read().unwrap_err();
            assert!(matches!(&e, KeyError::NotAKey { line: 2, .. }), "{e}");
            assert!(!e.to_string().contains(bad.trim()), "{e}");
        }
        assert!(matches!(file(&dir, 0o600, "# none\n\n").read(), Err(KeyError::Empty { .. })));
        assert!(matches!(file(&dir, 0o600, &key.repeat(2000)).read(), Err(KeyError::TooLong { .. })));
        assert!(matches!(KeySource::File(dir.path().into()).read(), Err(KeyError::NotAFile { .. })));
        let e = KeySource::File(dir.path().join("none")).read().unwrap_err();
        assert!(e.to_string().contains("rekindle store new-key"), "{e}");
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
        // A command that closes its output and continues.
        let e = run("exec >&-; sleep 1000", Duration::from_millis(300)).unwrap_err();
        assert!(matches!(e, KeyError::TimedOut { .. }), "{e}");
    }
}
