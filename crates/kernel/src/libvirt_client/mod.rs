//! libvirt's C library, loaded when it is first needed: the monitor of a libvirt domain's QEMU.
//!
//! libvirt holds the monitor of its QEMUs. Its library passes commands on and reports QEMU's events
//! (`libvirt-qemu.so.0`). It is loaded at run time: Rekindle also runs on hosts without libvirt. Its binary interface
//! is stable since libvirt 1.2.3. Only passing descriptors needs a newer one, libvirt 8.2.
//!
//! A call has no time limit if libvirt's daemon does not answer. Callers make calls on a thread that may stay
//! blocked.

mod events;
mod library;

pub use events::MonitorEvent;
use events::{SUBSCRIBERS, Subscriber, on_event, remove_subscriber};
use library::{Functions, Object, end_without_destructors, functions, on_exit};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Why libvirt's library cannot be used, or what it has reported.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The dynamic loader's message.
    #[error(
        "cannot load libvirt's library: {0}; install the package libvirt0 (Debian, Ubuntu) or libvirt-libs (Fedora)"
    )]
    NotInstalled(String),
    /// The library has no `virDomainQemuMonitorCommandWithFiles`.
    #[error("libvirt is too old to pass descriptors on: version 8.2 or newer is required")]
    TooOld,
    /// libvirt's own message.
    #[error("{0}")]
    Reported(String),
}

// libvirt's flags, which it does not change.
const XML_SECURE: c_uint = 1 << 0;
const XML_INACTIVE: c_uint = 1 << 1;
const XML_MIGRATABLE: c_uint = 1 << 3;
const SNAPSHOT_NO_METADATA: c_uint = 1 << 2;
const SNAPSHOT_DISK_ONLY: c_uint = 1 << 4;
const SNAPSHOT_REUSE_FILES: c_uint = 1 << 5;
const SNAPSHOT_ATOMIC: c_uint = 1 << 7;
const COMMIT_ACTIVE: c_uint = 1 << 2;
const COMMIT_BANDWIDTH_BYTES: c_uint = 1 << 4;
const ABORT_PIVOT: c_uint = 1 << 1;
const RESTORE_PAUSED: c_uint = 1 << 2;
const STATE_RUNNING: c_int = 1;
const STATE_PAUSED: c_int = 3;
const STATE_SHUT_OFF: c_int = 5;
const SHUT_OFF_BY_SHUTDOWN: c_int = 1;

/// What libvirt reports about a domain's guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DomainState {
    /// Its guest runs.
    Running,
    /// A QEMU has its guest, which does not run.
    Paused,
    /// No QEMU runs it.
    ShutOff,
    /// It is starting or ending, has crashed, or is suspended by itself.
    Other,
}

/// What libvirt copies from a disk's overlays into a disk below them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCommit {
    /// libvirt's name of the disk, such as `vda`.
    pub disk: String,
    /// The file that is written.
    pub base: String,
    /// The newest overlay that is copied; none: all of them, also the one that the guest writes to.
    pub top: Option<String>,
    /// Bytes per second, 0 for no limit.
    pub speed: u64,
}

fn c_string(text: &str) -> Result<CString, LibvirtError> {
    CString::new(text).map_err(|e| LibvirtError::Reported(format!("{text:?} has a zero byte: {e}")))
}

/// A connection to libvirt's daemon.
pub struct Connection {
    functions: &'static Functions,
    pointer: NonNull<c_void>,
}

// SAFETY: libvirt's connections may be used by several threads concurrently. Its last error is one of the calling thread.
unsafe impl Send for Connection {}
// SAFETY: as above.
unsafe impl Sync for Connection {}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the pointer is a connection on which this value holds the reference that `open` got.
        unsafe { (self.functions.close)(self.pointer.as_ptr()) };
    }
}

impl Connection {
    /// Opens a connection. Without `uri`, libvirt chooses (`LIBVIRT_DEFAULT_URI`, its configuration).
    ///
    /// # Errors
    /// [`LibvirtError`]; also without the library.
    pub fn open(uri: Option<&str>) -> Result<Self, LibvirtError> {
        let functions = functions()?;
        let uri = uri.map(c_string).transpose()?;
        // SAFETY: the URI is null or a string that lives until after the call.
        let connection = unsafe { (functions.open)(uri.as_ref().map_or(ptr::null(), |uri| uri.as_ptr())) };
        // What is registered last is called first, and libvirt loads further libraries when it opens a connection.
        // SAFETY: the function is one of this program.
        unsafe { on_exit(end_without_destructors, ptr::null_mut()) };
        Ok(Self { functions, pointer: functions.object(connection)? })
    }

    /// Returns whether the daemon has kept the connection open, as far as is known.
    pub fn is_alive(&self) -> bool {
        // SAFETY: the pointer is an open connection.
        unsafe { (self.functions.is_alive)(self.pointer.as_ptr()) == 1 }
    }

    /// Finds a domain by its number, UUID or name, in this order, as `virsh` does.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`] if there is none.
    pub fn lookup(self: &Arc<Self>, name: &str) -> Result<Domain, LibvirtError> {
        let (functions, connection) = (self.functions, self.pointer.as_ptr());
        let text = c_string(name)?;
        let is_uuid =
            name.len() == UUID_CHARACTERS && name.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
        // SAFETY: the connection is open, and the string lives until after the calls. A domain that is returned has a
        // reference, which `Domain` gives back.
        let domain = unsafe {
            let mut domain = name.parse().map_or(ptr::null_mut(), |id| (functions.lookup_by_id)(connection, id));
            if domain.is_null() && is_uuid {
                domain = (functions.lookup_by_uuid)(connection, text.as_ptr());
            }
            if domain.is_null() {
                domain = (functions.lookup_by_name)(connection, text.as_ptr());
            }
            domain
        };
        Ok(Domain { connection: Arc::clone(self), pointer: functions.object(domain)? })
    }

    /// Finds a domain as [`Connection::lookup`] does. `None`: libvirt does not know it.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`] if the daemon has ended: it knows no domain, but the domain may run.
    pub fn find(self: &Arc<Self>, name: &str) -> Result<Option<Domain>, LibvirtError> {
        match self.lookup(name) {
            Ok(domain) => Ok(Some(domain)),
            Err(_) if self.is_alive() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Defines a domain, so that libvirt keeps it when it is shut off. Changes its definition if it has one.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn define(&self, xml: &str) -> Result<(), LibvirtError> {
        let xml = c_string(xml)?;
        // SAFETY: connection and string live until after the call. The domain has a reference, which is given back.
        unsafe {
            let domain = (self.functions.define_domain)(self.pointer.as_ptr(), xml.as_ptr());
            (self.functions.free_domain)(self.functions.object(domain)?.as_ptr());
        }
        Ok(())
    }

    /// Starts the domain of a save image. Its guest stays paused.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`]; then libvirt runs no QEMU for it.
    pub fn restore_paused(&self, image: &str) -> Result<(), LibvirtError> {
        let image = c_string(image)?;
        let (connection, same_xml) = (self.pointer.as_ptr(), ptr::null());
        // SAFETY: connection and string live until after the call.
        let status = unsafe { (self.functions.restore_domain)(connection, image.as_ptr(), same_xml, RESTORE_PAUSED) };
        if status < 0 { Err(self.functions.last_error()) } else { Ok(()) }
    }

    /// Returns whether libvirt has an active network of this name.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`] if the name is not one.
    pub fn has_active_network(&self, name: &str) -> Result<bool, LibvirtError> {
        let name = c_string(name)?;
        // SAFETY: connection and string live until after the calls. A network that is returned has a reference, which is
        // given back.
        unsafe {
            let network = (self.functions.lookup_network)(self.pointer.as_ptr(), name.as_ptr());
            if network.is_null() {
                return Ok(false);
            }
            let is_active = (self.functions.is_network_active)(network) == 1;
            (self.functions.free_network)(network);
            Ok(is_active)
        }
    }
}

/// Length of a UUID as text.
const UUID_CHARACTERS: usize = 36;

/// A domain of libvirt.
pub struct Domain {
    connection: Arc<Connection>,
    pointer: NonNull<c_void>,
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: this value holds the reference that `lookup` got.
        unsafe { (self.connection.functions.free_domain)(self.pointer.as_ptr()) };
    }
}

impl Domain {
    /// Sends `command`, which is JSON, with descriptors for `getfd` or `add-fd`, to QEMU. Returns QEMU's reply, also
    /// if that is an error.
    ///
    /// # Errors
    /// [`LibvirtError`] if libvirt does not pass the command on.
    pub fn monitor(&self, command: &str, fds: &[BorrowedFd<'_>]) -> Result<String, LibvirtError> {
        let functions = self.connection.functions;
        let command = c_string(command)?;
        let mut numbers: Vec<c_int> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let count = c_uint::try_from(numbers.len()).map_err(|e| LibvirtError::Reported(e.to_string()))?;
        let mut reply: *mut c_char = ptr::null_mut();
        let (domain, command, none) = (self.pointer.as_ptr(), command.as_c_str(), 0);
        let status = if fds.is_empty() {
            // SAFETY: domain, string and the place for the reply live until after the call.
            unsafe { (functions.monitor_command)(domain, command.as_ptr(), &raw mut reply, none) }
        } else {
            let with_files = functions.monitor_command_with_files.ok_or(LibvirtError::TooOld)?;
            let (no_count, no_files) = (ptr::null_mut(), ptr::null_mut());
            let numbers = numbers.as_mut_ptr();
            // SAFETY: as above; `numbers` has `count` open descriptors, which libvirt duplicates. Null pointers mean
            // that descriptors from QEMU are not wanted.
            unsafe { with_files(domain, command.as_ptr(), count, numbers, no_count, no_files, &raw mut reply, none) }
        };
        if status < 0 || reply.is_null() {
            return Err(functions.last_error());
        }
        // SAFETY: on success the reply is a string that the caller owns, allocated by `malloc`.
        unsafe {
            let text = CStr::from_ptr(reply).to_string_lossy().into_owned();
            libc::free(reply.cast());
            Ok(text)
        }
    }

    /// Returns the domain's UUID as text.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn uuid(&self) -> Result<String, LibvirtError> {
        let functions = self.connection.functions;
        let mut text = [0_u8; UUID_CHARACTERS + 1];
        // SAFETY: the domain lives until after the call, which writes at most 37 bytes (`VIR_UUID_STRING_BUFLEN`), with
        // a zero byte at the end.
        let status = unsafe { (functions.domain_uuid)(self.pointer.as_ptr(), text.as_mut_ptr().cast()) };
        match CStr::from_bytes_until_nul(&text) {
            Ok(uuid) if status == 0 => Ok(uuid.to_string_lossy().into_owned()),
            _ => Err(functions.last_error()),
        }
    }

    /// Returns the domain's XML: of the running domain, or (`is_inactive`) the one with which it is started next time.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn xml(&self, is_inactive: bool) -> Result<String, LibvirtError> {
        self.xml_with(if is_inactive { XML_INACTIVE } else { 0 })
    }

    /// Returns the XML of the running domain for another libvirt, as in a migration: complete, with passwords.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn portable_xml(&self) -> Result<String, LibvirtError> {
        self.xml_with(XML_SECURE | XML_MIGRATABLE)
    }

    /// Returns the XML with which the domain is started next time, with passwords.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn definition(&self) -> Result<String, LibvirtError> {
        self.xml_with(XML_INACTIVE | XML_SECURE)
    }

    fn xml_with(&self, flags: c_uint) -> Result<String, LibvirtError> {
        let functions = self.connection.functions;
        // SAFETY: the domain lives until after the call. The result is null or a string that the caller owns, allocated by
        // `malloc`.
        unsafe {
            let text = (functions.domain_xml)(self.pointer.as_ptr(), flags);
            if text.is_null() {
                return Err(functions.last_error());
            }
            let xml = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            Ok(xml)
        }
    }

    /// Replaces the XML with which the domain is started next time.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn redefine(&self, xml: &str) -> Result<(), LibvirtError> {
        self.connection.define(xml)
    }

    /// Returns whether a QEMU runs the domain, and whether its guest runs.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn state(&self) -> Result<DomainState, LibvirtError> {
        Ok(match self.state_and_reason()?.0 {
            STATE_RUNNING => DomainState::Running,
            STATE_PAUSED => DomainState::Paused,
            STATE_SHUT_OFF => DomainState::ShutOff,
            _ => DomainState::Other,
        })
    }

    /// Returns whether no QEMU runs the domain because the last one has reported a shutdown: of its guest, or by a signal
    /// of another program than libvirt. A daemon that was started since does not know it.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn is_off_by_shutdown(&self) -> Result<bool, LibvirtError> {
        Ok(self.state_and_reason()? == (STATE_SHUT_OFF, SHUT_OFF_BY_SHUTDOWN))
    }

    fn state_and_reason(&self) -> Result<(c_int, c_int), LibvirtError> {
        let functions = self.connection.functions;
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the domain and the places for the results live until after the call.
        let status = unsafe { (functions.domain_state)(self.pointer.as_ptr(), &raw mut state, &raw mut reason, 0) };
        if status < 0 { Err(functions.last_error()) } else { Ok((state, reason)) }
    }

    /// Returns whether libvirt keeps the domain when it is shut off.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn is_persistent(&self) -> Result<bool, LibvirtError> {
        self.call(self.connection.functions.is_persistent).map(|answer| answer == 1)
    }

    /// Resumes the paused guest.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn resume(&self) -> Result<(), LibvirtError> {
        self.call(self.connection.functions.resume_domain).map(drop)
    }

    /// Ends the QEMU.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`], also if there is none.
    pub fn destroy(&self) -> Result<(), LibvirtError> {
        self.call(self.connection.functions.destroy_domain).map(drop)
    }

    /// Starts the domain as it is defined.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`], also if it runs already.
    pub fn start(&self) -> Result<(), LibvirtError> {
        self.call(self.connection.functions.start_domain).map(drop)
    }

    /// Requests a shutdown of the guest, through its agent or by its ACPI power button. Does not wait for it.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`], also if the guest does not run.
    pub fn request_shutdown(&self) -> Result<(), LibvirtError> {
        self.call(self.connection.functions.shut_down_domain).map(drop)
    }

    /// Returns whether libvirt's daemon starts the domain when it starts itself.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn is_started_automatically(&self) -> Result<bool, LibvirtError> {
        let functions = self.connection.functions;
        let mut answer = 0;
        // SAFETY: the domain and the place for the result live until after the call.
        let status = unsafe { (functions.is_started_automatically)(self.pointer.as_ptr(), &raw mut answer) };
        if status < 0 { Err(functions.last_error()) } else { Ok(answer != 0) }
    }

    fn call(&self, function: unsafe extern "C" fn(Object) -> c_int) -> Result<c_int, LibvirtError> {
        // SAFETY: the functions are libvirt's, and the domain lives until after the call.
        let status = unsafe { function(self.pointer.as_ptr()) };
        if status < 0 { Err(self.connection.functions.last_error()) } else { Ok(status) }
    }

    /// Puts overlays on disks as `xml`, a `<domainsnapshot>`, lists them: on all, or on none. The files exist. libvirt
    /// keeps no record of a snapshot.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn put_overlays(&self, xml: &str) -> Result<(), LibvirtError> {
        let functions = self.connection.functions;
        let xml = c_string(xml)?;
        let flags = SNAPSHOT_DISK_ONLY | SNAPSHOT_NO_METADATA | SNAPSHOT_REUSE_FILES | SNAPSHOT_ATOMIC;
        // SAFETY: domain and string live until after the call. The snapshot has a reference, which is given back.
        unsafe {
            let snapshot = (functions.create_snapshot)(self.pointer.as_ptr(), xml.as_ptr(), flags);
            (functions.free_snapshot)(functions.object(snapshot)?.as_ptr());
        }
        Ok(())
    }

    /// Starts to merge overlays.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`], also if another block job uses the disk.
    pub fn start_commit(&self, commit: &BlockCommit) -> Result<(), LibvirtError> {
        let functions = self.connection.functions;
        let (disk, base) = (c_string(&commit.disk)?, c_string(&commit.base)?);
        let top = commit.top.as_deref().map(c_string).transpose()?;
        let top_pointer = top.as_ref().map_or(ptr::null(), |top| top.as_ptr());
        let flags = COMMIT_BANDWIDTH_BYTES | if top.is_none() { COMMIT_ACTIVE } else { 0 };
        let (domain, speed) = (self.pointer.as_ptr(), c_ulong::try_from(commit.speed).unwrap_or(c_ulong::MAX));
        // SAFETY: domain and strings live until after the call.
        let status =
            unsafe { (functions.block_commit)(domain, disk.as_ptr(), base.as_ptr(), top_pointer, speed, flags) };
        if status < 0 { Err(functions.last_error()) } else { Ok(()) }
    }

    /// Ends the block job of a disk, and waits for that. `is_pivoted`: the disk is on the file that the job has written.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`], also if there is no job.
    pub fn end_block_job(&self, disk: &str, is_pivoted: bool) -> Result<(), LibvirtError> {
        let functions = self.connection.functions;
        let disk = c_string(disk)?;
        let flags = if is_pivoted { ABORT_PIVOT } else { 0 };
        // SAFETY: domain and string live until after the call.
        let status = unsafe { (functions.abort_block_job)(self.pointer.as_ptr(), disk.as_ptr(), flags) };
        if status < 0 { Err(functions.last_error()) } else { Ok(()) }
    }

    /// Sends the events of the domain's QEMU with one of the names `names` to `events`, until the result is dropped.
    /// Events for which `events` has no room are dropped.
    ///
    /// # Errors
    /// [`LibvirtError::Reported`].
    pub fn subscribe(
        &self,
        names: &'static [&'static str],
        events: SyncSender<MonitorEvent>,
    ) -> Result<Subscription, LibvirtError> {
        let functions = self.connection.functions;
        let key = SUBSCRIBERS.add(Subscriber { names, events });
        // SAFETY: the objects live until after the call. libvirt passes the key, which is no pointer for it, to `on_event`
        // and to `remove_subscriber`.
        let id = unsafe {
            (functions.register_events)(
                self.connection.pointer.as_ptr(),
                self.pointer.as_ptr(),
                ptr::null(),
                on_event,
                ptr::without_provenance_mut(key),
                remove_subscriber,
                0,
            )
        };
        if id < 0 {
            let e = functions.last_error();
            // libvirt may have done so already: old versions do when the daemon rejects the registration.
            SUBSCRIBERS.remove(key);
            return Err(e);
        }
        Ok(Subscription { connection: Arc::clone(&self.connection), id })
    }
}

/// The delivery of a domain's events, which ends when this is dropped.
pub struct Subscription {
    connection: Arc<Connection>,
    id: c_int,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // SAFETY: the connection is open, and the number is that of a registration that was not yet removed.
        unsafe { (self.connection.functions.deregister_events)(self.connection.pointer.as_ptr(), self.id) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvError, sync_channel};

    /// libvirt's built-in driver for tests. It has one domain, and no monitor.
    const TEST_DRIVER: &str = "test:///default";

    #[test]
    fn a_domain_is_found_by_name_number_and_uuid() {
        let connection = Arc::new(Connection::open(Some(TEST_DRIVER)).unwrap());
        assert!(connection.is_alive());
        for name in ["test", "1", "6695eb01-f6a4-8304-79aa-97f2502e193f"] {
            let domain = connection.lookup(name).unwrap();
            assert_eq!(domain.uuid().unwrap(), "6695eb01-f6a4-8304-79aa-97f2502e193f");
            let e = domain.monitor("{}", &[]).unwrap_err();
            assert!(e.to_string().contains("not supported by the connection driver"), "{name}: {e}");
            assert!(domain.xml(true).unwrap().contains("<name>test</name>"));
            let commit = BlockCommit { disk: "vda".into(), base: "/base".into(), top: None, speed: 0 };
            domain.start_commit(&commit).unwrap_err();
            domain.end_block_job("vda", true).unwrap_err();
            domain.put_overlays("<domainsnapshot").unwrap_err();
        }
        let e = connection.lookup("it's none").err().unwrap();
        assert!(e.to_string().contains("Domain not found"), "{e}");
    }

    #[test]
    fn a_registration_that_libvirt_refuses_leaves_no_receiver() {
        let connection = Arc::new(Connection::open(Some(TEST_DRIVER)).unwrap());
        let (sender, receiver) = sync_channel(1);
        assert!(connection.lookup("test").unwrap().subscribe(&["STOP"], sender).is_err());
        // The only sender was dropped.
        assert_eq!(receiver.recv(), Err(RecvError));
    }
}
