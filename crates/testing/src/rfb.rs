//! A client of a VNC server: the RFB protocol (RFC 6143), as far as tests need it.

use des::Des;
use des::cipher::{Array, BlockCipherEncrypt, KeyInit};
use std::io::{self, Read, Write};

const BANNER: &[u8; 12] = b"RFB 003.008\n";
const RAW_ENCODING: i32 = 0;
/// Bytes of a pixel in the format of QEMU's server.
const PIXEL_BYTES: usize = 4;

/// Ways to log in.
const NO_AUTHENTICATION: u8 = 1;
const VNC_AUTHENTICATION: u8 = 2;

/// What a server shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Screen {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Row by row, 4 bytes each.
    pub pixels: Vec<u8>,
}

impl Screen {
    /// Returns whether all pixels have one colour.
    pub fn is_blank(&self) -> bool {
        self.pixels.chunks(PIXEL_BYTES).all(|pixel| pixel == &self.pixels[..PIXEL_BYTES])
    }
}

/// Reads the banner of a server.
pub fn banner(stream: &mut impl Read) -> io::Result<()> {
    let banner: [u8; 12] = read(stream)?;
    if &banner == BANNER { Ok(()) } else { Err(io::Error::other(format!("the banner {banner:?}"))) }
}

/// Logs in, and returns the screen. `PermissionDenied` if the server rejects the client.
pub fn screen(mut stream: impl Read + Write, password: Option<&str>) -> io::Result<Screen> {
    banner(&mut stream)?;
    stream.write_all(BANNER)?;
    log_in(&mut stream, password)?;
    const SHARED: u8 = 1;
    stream.write_all(&[SHARED])?;
    let (width, height) = (usize::from(read_u16(&mut stream)?), usize::from(read_u16(&mut stream)?));
    let format: [u8; 16] = read(&mut stream)?;
    assert_eq!(usize::from(format[0]), PIXEL_BYTES * 8, "bits of a pixel");
    let name_length = read_u32(&mut stream)?;
    skip(&mut stream, name_length as usize)?;

    // SetEncodings with one encoding.
    stream.write_all(&[2, 0, 0, 1])?;
    stream.write_all(&RAW_ENCODING.to_be_bytes())?;
    // FramebufferUpdateRequest for all of the screen.
    stream.write_all(&[3, 0, 0, 0, 0, 0])?;
    stream.write_all(&(width as u16).to_be_bytes())?;
    stream.write_all(&(height as u16).to_be_bytes())?;
    let mut screen = Screen { width, height, pixels: vec![0; width * height * PIXEL_BYTES] };
    let mut unknown: Vec<bool> = vec![true; width * height];
    while unknown.contains(&true) {
        let [message, _]: [u8; 2] = read(&mut stream)?;
        assert_eq!(message, 0, "only updates are expected");
        for _ in 0..read_u16(&mut stream)? {
            update(&mut stream, &mut screen, &mut unknown)?;
        }
    }
    Ok(screen)
}

/// Reads a rectangle of an update.
fn update(stream: &mut impl Read, screen: &mut Screen, unknown: &mut [bool]) -> io::Result<()> {
    let mut number = || read_u16(stream).map(usize::from);
    let (x, y, width, height) = (number()?, number()?, number()?, number()?);
    let encoding: [u8; 4] = read(stream)?;
    assert_eq!(i32::from_be_bytes(encoding), RAW_ENCODING);
    for row in y..y + height {
        let start = row * screen.width + x;
        stream.read_exact(&mut screen.pixels[start * PIXEL_BYTES..(start + width) * PIXEL_BYTES])?;
        unknown[start..start + width].fill(false);
    }
    Ok(())
}

fn log_in(stream: &mut (impl Read + Write), password: Option<&str>) -> io::Result<()> {
    let [count] = read(stream)?;
    if count == 0 {
        return Err(rejection(stream)?);
    }
    let mut offered = vec![0; usize::from(count)];
    stream.read_exact(&mut offered)?;
    let chosen = if password.is_some() { VNC_AUTHENTICATION } else { NO_AUTHENTICATION };
    if !offered.contains(&chosen) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("the server offers {offered:?}")));
    }
    stream.write_all(&[chosen])?;
    if let Some(password) = password {
        let challenge: [u8; 16] = read(stream)?;
        stream.write_all(&response(challenge, password))?;
    }
    if read_u32(stream)? == 0 { Ok(()) } else { Err(rejection(stream)?) }
}

/// Encrypts the challenge with the password, whose bits are in the reverse order in each byte.
fn response(mut challenge: [u8; 16], password: &str) -> [u8; 16] {
    let mut key = [0; 8];
    for (byte, letter) in key.iter_mut().zip(password.bytes()) {
        *byte = letter.reverse_bits();
    }
    let cipher = Des::new(&Array::from(key));
    for block in challenge.chunks_mut(8) {
        let mut encrypted = Array::try_from(&*block).unwrap();
        cipher.encrypt_block(&mut encrypted);
        block.copy_from_slice(&encrypted);
    }
    challenge
}

fn rejection(stream: &mut impl Read) -> io::Result<io::Error> {
    let length = read_u32(stream)?;
    let mut reason = vec![0; length as usize];
    stream.read_exact(&mut reason)?;
    Ok(io::Error::new(io::ErrorKind::PermissionDenied, String::from_utf8_lossy(&reason).into_owned()))
}

fn skip(stream: &mut impl Read, length: usize) -> io::Result<()> {
    stream.read_exact(&mut vec![0; length])
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_u16(stream: &mut impl Read) -> io::Result<u16> {
    read(stream).map(u16::from_be_bytes)
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    read(stream).map(u32::from_be_bytes)
}
