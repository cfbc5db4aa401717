//! Encrypts and authenticates the files of a store (AES-256-GCM). `docs/store-format.md`, section *Encryption*.
//!
//! ```text
//! master key (of the owner) --HKDF(salt and identity of the file)--> key of one file --> seals pieces of this file
//! ```
//!
//! A file's key is used with each nonce once: the nonce is the offset of the sealed piece in the file, and no byte of an
//! encrypted file is ever written twice.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::io;
use std::sync::Arc;
use uuid::Uuid;
use zeroize::Zeroizing;

/// Bytes that sealing adds to a piece: its authentication tag.
pub const TAG_LEN: usize = 16;
/// Bytes of a master key.
pub const KEY_LEN: usize = 32;
/// Bytes of an encoded [`Seal`].
pub const SEAL_LEN: usize = 40;
/// Bytes of a [`SealId`].
pub const SEAL_ID_LEN: usize = 16;

const FILE_KEY_LABEL: &[u8] = b"rekindle store file 1\0";
const KEY_ID_LABEL: &[u8] = b"rekindle store key id 1\0";

/// Public name of a master key. It reveals nothing about the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId([u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

/// The length of a derived value, for HKDF.
struct Length(usize);

impl ring::hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn no_random_numbers() -> io::Error {
    io::Error::other("the kernel provides no random numbers")
}

fn not_sealed() -> io::Error {
    io::Error::other("the data cannot be encrypted")
}

/// Returns `N` random bytes.
///
/// # Errors
/// The kernel provides none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| no_random_numbers())?;
    Ok(bytes)
}

/// A key from which the keys of files are derived. It encrypts nothing itself.
pub struct MasterKey {
    id: KeyId,
    secret: Zeroizing<[u8; KEY_LEN]>,
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MasterKey({})", self.id)
    }
}

impl MasterKey {
    #[must_use]
    pub fn new(secret: [u8; KEY_LEN]) -> Self {
        let mut id = [0; 8];
        let derived = Salt::new(HKDF_SHA256, &[]).extract(&secret);
        // Fails only for a value longer than 8160 bytes.
        let _ = derived.expand(&[KEY_ID_LABEL], Length(id.len())).and_then(|id_bytes| id_bytes.fill(&mut id));
        Self { id: KeyId(id), secret: Zeroizing::new(secret) }
    }

    #[must_use]
    pub fn id(&self) -> KeyId {
        self.id
    }
}

/// The master keys of an owner, at least one. The first seals new files; all of them open files.
#[derive(Debug)]
pub struct KeyRing(Vec<MasterKey>);

impl KeyRing {
    /// Returns `None` without a key.
    #[must_use]
    pub fn new(keys: Vec<MasterKey>) -> Option<Self> {
        if keys.is_empty() { None } else { Some(Self(keys)) }
    }
}

/// The key of a file, as its header names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seal {
    pub key: KeyId,
    /// Random for each file.
    salt: [u8; 32],
}

impl Seal {
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key.0);
        out.extend_from_slice(&self.salt);
    }

    /// Returns what distinguishes the file from every other one that has, or has had, the same name.
    #[must_use]
    pub fn id(&self) -> SealId {
        let mut id = [0; SEAL_ID_LEN];
        id.iter_mut().zip(self.salt).for_each(|(to, from)| *to = from);
        SealId(id)
    }

    #[must_use]
    pub fn decode(bytes: [u8; SEAL_LEN]) -> Self {
        let (mut key, mut salt) = ([0; 8], [0; 32]);
        key.iter_mut().chain(&mut salt).zip(bytes).for_each(|(to, from)| *to = from);
        Self { key: KeyId(key), salt }
    }
}

/// Identifies one encrypted file: the beginning of the random number from which its key is derived. After a store was rolled
/// back, another file of the same name may be written; no key opens both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealId(pub [u8; SEAL_ID_LEN]);

/// A file of a store, as its key is bound to it. A file that is moved to another place cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileIdentity {
    Superblock,
    /// The log entry with this number.
    Entry(u64),
    Segment {
        epoch: u64,
        number: u64,
    },
    /// A base index that the owner of an epoch has written. Its header has the checkpoints for which it can be used.
    BaseIndex {
        epoch: u64,
    },
}

impl FileIdentity {
    fn encode(self) -> Vec<u8> {
        let (kind, first, second) = match self {
            Self::Superblock => (1, 0, 0),
            Self::Entry(log_number) => (2, log_number, 0),
            Self::Segment { epoch, number } => (3, epoch, number),
            Self::BaseIndex { epoch } => (4, epoch, 0),
        };
        let mut out = vec![kind];
        out.extend(u64::to_le_bytes(first));
        out.extend(u64::to_le_bytes(second));
        out
    }
}

/// The keys for the files of one store.
#[derive(Debug, Clone)]
pub struct StoreKeys {
    keys: Arc<KeyRing>,
    /// ID of the store.
    store: Uuid,
    /// UUID of the store's VM.
    vm: Uuid,
}

impl StoreKeys {
    #[must_use]
    pub fn new(keys: Arc<KeyRing>, store: Uuid, vm: Uuid) -> Self {
        Self { keys, store, vm }
    }

    /// Returns a new key for a file that is being created.
    ///
    /// # Errors
    /// The kernel provides no random numbers.
    pub fn create(&self, file: FileIdentity) -> io::Result<(Seal, FileKey)> {
        let master = self.keys.0.first().ok_or_else(not_sealed)?;
        let seal = Seal { key: master.id, salt: random()? };
        let key = self.derive(master, seal, file).ok_or_else(not_sealed)?;
        Ok((seal, key))
    }

    /// Returns the key of an existing file; `None` if the owner has not given the master key.
    #[must_use]
    pub fn find(&self, seal: Seal, file: FileIdentity) -> Option<FileKey> {
        self.derive(self.keys.0.iter().find(|master| master.id == seal.key)?, seal, file)
    }

    fn derive(&self, master: &MasterKey, seal: Seal, file: FileIdentity) -> Option<FileKey> {
        let identity = file.encode();
        let info = [FILE_KEY_LABEL, self.store.as_bytes(), self.vm.as_bytes(), &identity];
        let master = Salt::new(HKDF_SHA256, &seal.salt).extract(&*master.secret);
        let derived = master.expand(&info, &AES_256_GCM).ok()?;
        let key = Arc::new(LessSafeKey::new(UnboundKey::from(derived)));
        #[cfg(test)]
        let name = [&seal.key.0[..], &seal.salt, self.store.as_bytes(), self.vm.as_bytes(), &identity].concat();
        Some(FileKey {
            key,
            #[cfg(test)]
            name: name.into(),
        })
    }
}

/// The key of one file. `offset` is always that of the sealed piece in the file, of which each is used once.
#[derive(Debug, Clone)]
pub struct FileKey {
    key: Arc<LessSafeKey>,
    /// All that the key is derived from, to find keys that are used with a nonce twice.
    #[cfg(test)]
    name: Arc<[u8]>,
}

fn nonce(offset: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes.iter_mut().skip(NONCE_LEN - 8).zip(offset.to_le_bytes()).for_each(|(to, from)| *to = from);
    Nonce::assume_unique_for_key(bytes)
}

impl FileKey {
    /// Encrypts a piece in place, and returns its tag. `context` is authenticated with it.
    ///
    /// # Errors
    /// The piece is longer than 64 GiB.
    pub fn seal(&self, offset: u64, context: &[u8], piece: &mut [u8]) -> io::Result<[u8; TAG_LEN]> {
        #[cfg(test)]
        tests::note_nonce(&self.name, offset);
        let sealed = self.key.seal_in_place_separate_tag(nonce(offset), Aad::from(context), piece);
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(sealed.map_err(|_| not_sealed())?.as_ref());
        Ok(tag)
    }

    /// Decrypts a piece, whose tag is at its end, in place. Returns the content, or `None` if the piece was not sealed
    /// with this key, offset and context.
    #[must_use]
    pub fn open<'p>(&self, offset: u64, context: &[u8], piece: &'p mut [u8]) -> Option<&'p mut [u8]> {
        self.key.open_in_place(nonce(offset), Aad::from(context), piece).ok()
    }

    /// Decrypts the piece from byte `begin` to the end of `bytes`, and moves it to the front.
    #[must_use]
    pub fn open_rest(&self, offset: u64, context: &[u8], mut bytes: Vec<u8>, begin: usize) -> Option<Vec<u8>> {
        let len = self.key.open_within(nonce(offset), Aad::from(context), &mut bytes, begin..).ok()?.len();
        bytes.truncate(len);
        Some(bytes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::{LazyLock, Mutex, PoisonError};

    /// What the key of a file is derived from, and a nonce.
    type UsedNonce = (Vec<u8>, u64);

    /// All keys and nonces with which any test of this process has sealed a piece.
    static USED: LazyLock<Mutex<HashSet<UsedNonce>>> = LazyLock::new(Mutex::default);

    /// Asserts that no piece is sealed with a key and a nonce that another piece was sealed with.
    pub fn note_nonce(key: &[u8], offset: u64) {
        let is_new = USED.lock().unwrap_or_else(PoisonError::into_inner).insert((key.to_vec(), offset));
        assert!(is_new, "a key is used twice with the nonce {offset}");
    }

    /// Returns the number of pieces that were sealed.
    pub fn sealed_pieces() -> usize {
        USED.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn ring(bytes: &[u8]) -> Arc<KeyRing> {
        Arc::new(KeyRing::new(bytes.iter().map(|byte| MasterKey::new([*byte; 32])).collect()).unwrap())
    }

    #[test]
    fn a_piece_opens_only_with_its_key_at_its_place_in_its_file() {
        let store = |keys: &[u8], id, vm| StoreKeys::new(ring(keys), Uuid::from_u128(id), Uuid::from_u128(vm));
        let file = FileIdentity::Segment { epoch: 1, number: 2 };
        let (seal, key) = store(&[1], 1, 1).create(file).unwrap();
        let mut piece = *b"content and its tag.............";
        let tag = key.seal(4096, b"context", &mut piece[..16]).unwrap();
        piece[16..].copy_from_slice(&tag);
        let opened = |key: &FileKey, offset, context: &[u8], mut piece: [u8; 32]| {
            key.open(offset, context, &mut piece).map(|content| content.to_vec())
        };
        assert_eq!(opened(&key, 4096, b"context", piece).unwrap(), b"content and its ");
        assert!(opened(&key, 8192, b"context", piece).is_none());
        assert!(opened(&key, 4096, b"contexts", piece).is_none());
        for bit in 0..piece.len() * 8 {
            let mut bad = piece;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(opened(&key, 4096, b"context", bad).is_none());
        }
        let found = |store: &StoreKeys, seal, file| opened(&store.find(seal, file).unwrap(), 4096, b"context", piece);
        assert!(found(&store(&[1], 1, 1), seal, file).is_some());
        assert!(found(&store(&[2, 1], 1, 1), seal, file).is_some(), "after a rotation");
        assert!(store(&[2], 1, 1).find(seal, file).is_none());
        assert!(found(&store(&[1], 2, 1), seal, file).is_none());
        assert!(found(&store(&[1], 1, 2), seal, file).is_none());
        for other in [
            FileIdentity::Segment { epoch: 1, number: 3 },
            FileIdentity::Segment { epoch: 2, number: 2 },
            FileIdentity::Entry(1),
            FileIdentity::BaseIndex { epoch: 1 },
        ] {
            assert!(found(&store(&[1], 1, 1), seal, other).is_none());
        }
        let (other_seal, _) = store(&[1], 1, 1).create(file).unwrap();
        assert!(found(&store(&[1], 1, 1), other_seal, file).is_none(), "another salt");
    }

    #[test]
    fn the_id_of_a_key_is_no_part_of_it() {
        let key = MasterKey::new([7; 32]);
        assert_ne!(key.id(), MasterKey::new([8; 32]).id());
        assert_ne!(key.id().0, [7; 8]);
        assert_eq!(format!("{key:?}"), format!("MasterKey({})", key.id()));
    }
}
