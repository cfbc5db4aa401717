//! A client of a SPICE server: the login of the SPICE protocol, as far as tests need it.

use std::fs;
use std::io::{self, Error, ErrorKind, Read, Write};
use std::process::Command;

const MAGIC: &[u8; 4] = b"REDQ";
/// Major and minor version.
const VERSION: [u32; 2] = [2, 2];
/// Bytes of the server's public key, and of a password that is encrypted with it.
const KEY_BYTES: usize = 162;
const TICKET_BYTES: usize = 128;
/// The channel of a session that must be opened first.
const MAIN_CHANNEL: u8 = 1;
const NO_ERROR: u32 = 0;
const NEEDS_TLS: u32 = 5;
const PERMISSION_DENIED: u32 = 7;

/// Logs in. `password` is empty for a server without. `PermissionDenied` if the server rejects it.
pub fn log_in(stream: &mut (impl Read + Write), password: &str) -> io::Result<()> {
    let key = greet(stream)?;
    stream.write_all(&encrypt(&key, password)?)?;
    match read_u32(stream)? {
        NO_ERROR => Ok(()),
        PERMISSION_DENIED => Err(ErrorKind::PermissionDenied.into()),
        error => Err(Error::other(format!("SPICE error {error}"))),
    }
}

/// Opens the main channel without capabilities, and returns the server's public key. `ConnectionRefused` if the server
/// has this channel only with TLS.
pub fn greet(stream: &mut (impl Read + Write)) -> io::Result<[u8; KEY_BYTES]> {
    // Number of the session, channel and its number, no capabilities, and where these would be.
    let mut message = 0_u32.to_le_bytes().to_vec();
    message.extend([MAIN_CHANNEL, 0]);
    message.extend([0_u32, 0, 18].into_iter().flat_map(u32::to_le_bytes));
    stream.write_all(MAGIC)?;
    for number in VERSION.into_iter().chain([message.len() as u32]) {
        stream.write_all(&number.to_le_bytes())?;
    }
    stream.write_all(&message)?;

    let mut magic = [0; 4];
    stream.read_exact(&mut magic)?;
    assert_eq!(&magic, MAGIC);
    assert_eq!(read_u32(stream)?, VERSION[0]);
    read_u32(stream)?;
    let mut reply = vec![0; read_u32(stream)? as usize];
    stream.read_exact(&mut reply)?;
    let (error, rest) = reply.split_first_chunk().expect("an error code");
    match u32::from_le_bytes(*error) {
        NO_ERROR => {}
        NEEDS_TLS => return Err(ErrorKind::ConnectionRefused.into()),
        error => return Err(Error::other(format!("SPICE error {error}"))),
    }
    Ok(*rest.first_chunk().expect("a public key"))
}

/// Encrypts a password by RSA with OAEP.
fn encrypt(key: &[u8], password: &str) -> io::Result<Vec<u8>> {
    let directory = tempfile::tempdir()?;
    let [key_file, password_file] = ["key", "password"].map(|name| directory.path().join(name));
    fs::write(&key_file, key)?;
    fs::write(&password_file, format!("{password}\0"))?;
    let encrypted = Command::new("openssl")
        .args(["pkeyutl", "-encrypt", "-pubin", "-keyform", "DER", "-pkeyopt", "rsa_padding_mode:oaep"])
        .arg("-inkey")
        .arg(&key_file)
        .arg("-in")
        .arg(&password_file)
        .output()?;
    assert!(encrypted.status.success(), "openssl: {}", String::from_utf8_lossy(&encrypted.stderr));
    assert_eq!(encrypted.stdout.len(), TICKET_BYTES);
    Ok(encrypted.stdout)
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
