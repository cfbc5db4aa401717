//! The functions of libvirt's two libraries: loading them, and their declarations.

use super::LibvirtError;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ulong, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

/// A `virConnectPtr` or `virDomainPtr`.
pub(super) type Object = *mut c_void;
pub(super) type EventCallback =
    extern "C" fn(Object, Object, *const c_char, c_longlong, c_uint, *const c_char, *mut c_void);

/// The functions of the two libraries, which are never unloaded.
pub(super) struct Functions {
    pub(super) open: unsafe extern "C" fn(*const c_char) -> Object,
    pub(super) close: unsafe extern "C" fn(Object) -> c_int,
    pub(super) is_alive: unsafe extern "C" fn(Object) -> c_int,
    pub(super) last_error_message: unsafe extern "C" fn() -> *const c_char,
    pub(super) lookup_by_id: unsafe extern "C" fn(Object, c_int) -> Object,
    pub(super) lookup_by_name: unsafe extern "C" fn(Object, *const c_char) -> Object,
    pub(super) lookup_by_uuid: unsafe extern "C" fn(Object, *const c_char) -> Object,
    pub(super) free_domain: unsafe extern "C" fn(Object) -> c_int,
    pub(super) domain_uuid: unsafe extern "C" fn(Object, *mut c_char) -> c_int,
    pub(super) monitor_command: unsafe extern "C" fn(Object, *const c_char, *mut *mut c_char, c_uint) -> c_int,
    pub(super) monitor_command_with_files: Option<
        unsafe extern "C" fn(
            Object,
            *const c_char,
            c_uint,
            *mut c_int,
            *mut c_uint,
            *mut *mut c_int,
            *mut *mut c_char,
            c_uint,
        ) -> c_int,
    >,
    pub(super) register_events: unsafe extern "C" fn(
        Object,
        Object,
        *const c_char,
        EventCallback,
        *mut c_void,
        extern "C" fn(*mut c_void),
        c_uint,
    ) -> c_int,
    pub(super) deregister_events: unsafe extern "C" fn(Object, c_int) -> c_int,
    pub(super) run_event_loop_once: unsafe extern "C" fn() -> c_int,
    pub(super) domain_xml: unsafe extern "C" fn(Object, c_uint) -> *mut c_char,
    pub(super) create_snapshot: unsafe extern "C" fn(Object, *const c_char, c_uint) -> Object,
    pub(super) free_snapshot: unsafe extern "C" fn(Object) -> c_int,
    pub(super) block_commit:
        unsafe extern "C" fn(Object, *const c_char, *const c_char, *const c_char, c_ulong, c_uint) -> c_int,
    pub(super) abort_block_job: unsafe extern "C" fn(Object, *const c_char, c_uint) -> c_int,
    pub(super) define_domain: unsafe extern "C" fn(Object, *const c_char) -> Object,
    pub(super) is_persistent: unsafe extern "C" fn(Object) -> c_int,
    pub(super) domain_state: unsafe extern "C" fn(Object, *mut c_int, *mut c_int, c_uint) -> c_int,
    pub(super) restore_domain: unsafe extern "C" fn(Object, *const c_char, *const c_char, c_uint) -> c_int,
    pub(super) resume_domain: unsafe extern "C" fn(Object) -> c_int,
    pub(super) destroy_domain: unsafe extern "C" fn(Object) -> c_int,
    pub(super) start_domain: unsafe extern "C" fn(Object) -> c_int,
    pub(super) shut_down_domain: unsafe extern "C" fn(Object) -> c_int,
    pub(super) is_started_automatically: unsafe extern "C" fn(Object, *mut c_int) -> c_int,
    pub(super) lookup_network: unsafe extern "C" fn(Object, *const c_char) -> Object,
    pub(super) is_network_active: unsafe extern "C" fn(Object) -> c_int,
    pub(super) free_network: unsafe extern "C" fn(Object) -> c_int,
}
/// Returns the functions. The first call loads the libraries and starts libvirt's event loop.
pub(super) fn functions() -> Result<&'static Functions, LibvirtError> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    let functions = FUNCTIONS.get_or_init(|| load().map_err(|e| e.to_string()));
    let functions = functions.as_ref().map_err(|e| LibvirtError::NotInstalled(e.clone()))?;
    static EVENT_LOOP: OnceLock<Result<(), String>> = OnceLock::new();
    let started = EVENT_LOOP.get_or_init(|| {
        let event_loop = thread::Builder::new().name("libvirt events".into());
        let run = move || loop {
            // SAFETY: `load` has registered the default event loop, and only this thread runs it.
            if unsafe { (functions.run_event_loop_once)() } < 0 {
                // libvirt could not wait for events: without a pause this would be a busy loop.
                thread::sleep(EVENT_LOOP_RETRY);
            }
        };
        event_loop.spawn(run).map(drop).map_err(|e| e.to_string())
    });
    started.clone().map_err(LibvirtError::Reported)?;
    Ok(functions)
}

/// How long to wait after the event loop has failed.
const EVENT_LOOP_RETRY: Duration = Duration::from_millis(100);

fn load() -> Result<Functions, libloading::Error> {
    type SetErrorFunction = unsafe extern "C" fn(*mut c_void, extern "C" fn(*mut c_void, *mut c_void));
    // SAFETY: loading the libraries runs their initialisers, which only set up their own state. Each symbol's type is
    // its declaration in libvirt's headers, which libvirt does not change under the version number `.so.0`. The
    // function pointers outlive their symbols because the libraries are never unloaded (`forget`). libvirt must be
    // initialised, and its event loop be registered, before a connection is opened: nothing else here opens one.
    unsafe {
        let base = Library::new("libvirt.so.0")?;
        let qemu = Library::new("libvirt-qemu.so.0")?;
        let functions = Functions {
            open: *base.get(b"virConnectOpen\0")?,
            close: *base.get(b"virConnectClose\0")?,
            is_alive: *base.get(b"virConnectIsAlive\0")?,
            last_error_message: *base.get(b"virGetLastErrorMessage\0")?,
            lookup_by_id: *base.get(b"virDomainLookupByID\0")?,
            lookup_by_name: *base.get(b"virDomainLookupByName\0")?,
            lookup_by_uuid: *base.get(b"virDomainLookupByUUIDString\0")?,
            free_domain: *base.get(b"virDomainFree\0")?,
            domain_uuid: *base.get(b"virDomainGetUUIDString\0")?,
            monitor_command: *qemu.get(b"virDomainQemuMonitorCommand\0")?,
            monitor_command_with_files: qemu.get(b"virDomainQemuMonitorCommandWithFiles\0").ok().map(|symbol| *symbol),
            register_events: *qemu.get(b"virConnectDomainQemuMonitorEventRegister\0")?,
            deregister_events: *qemu.get(b"virConnectDomainQemuMonitorEventDeregister\0")?,
            run_event_loop_once: *base.get(b"virEventRunDefaultImpl\0")?,
            domain_xml: *base.get(b"virDomainGetXMLDesc\0")?,
            create_snapshot: *base.get(b"virDomainSnapshotCreateXML\0")?,
            free_snapshot: *base.get(b"virDomainSnapshotFree\0")?,
            block_commit: *base.get(b"virDomainBlockCommit\0")?,
            abort_block_job: *base.get(b"virDomainBlockJobAbort\0")?,
            define_domain: *base.get(b"virDomainDefineXML\0")?,
            is_persistent: *base.get(b"virDomainIsPersistent\0")?,
            domain_state: *base.get(b"virDomainGetState\0")?,
            restore_domain: *base.get(b"virDomainRestoreFlags\0")?,
            resume_domain: *base.get(b"virDomainResume\0")?,
            destroy_domain: *base.get(b"virDomainDestroy\0")?,
            start_domain: *base.get(b"virDomainCreate\0")?,
            shut_down_domain: *base.get(b"virDomainShutdown\0")?,
            is_started_automatically: *base.get(b"virDomainGetAutostart\0")?,
            lookup_network: *base.get(b"virNetworkLookupByName\0")?,
            is_network_active: *base.get(b"virNetworkIsActive\0")?,
            free_network: *base.get(b"virNetworkFree\0")?,
        };
        let initialize = *base.get::<unsafe extern "C" fn() -> c_int>(b"virInitialize\0")?;
        let register_event_loop = *base.get::<unsafe extern "C" fn() -> c_int>(b"virEventRegisterDefaultImpl\0")?;
        let set_error_function = *base.get::<SetErrorFunction>(b"virSetErrorFunc\0")?;
        std::mem::forget((base, qemu));
        // A failure of either is reported by the first call that needs it.
        initialize();
        set_error_function(ptr::null_mut(), ignore_error);
        register_event_loop();
        Ok(functions)
    }
}

unsafe extern "C" {
    /// glibc's function: `function` is called by `exit`, with its status.
    pub(super) fn on_exit(function: extern "C" fn(c_int, *mut c_void), data: *mut c_void) -> c_int;
}

/// Ends the process before `exit` runs what the libraries have registered for it. A thread may still be in one of their
/// functions, such as the one that closes a connection, and both would release the same memory (seen with OpenSSL's
/// `OPENSSL_cleanup`): `malloc` would abort the process.
pub(super) extern "C" fn end_without_destructors(status: c_int, _data: *mut c_void) {
    // SAFETY: ends the process. Rust has flushed its output before it calls `exit`; nothing here writes by C's streams.
    unsafe { libc::_exit(status) }
}

/// Replaces libvirt's own function, which prints each error on standard error.
extern "C" fn ignore_error(_data: *mut c_void, _error: *mut c_void) {}

impl Functions {
    /// Returns the error of the last call, which this thread has made.
    pub(super) fn last_error(&self) -> LibvirtError {
        // SAFETY: the result is a string of this thread, valid until its next call into libvirt, or null.
        let message = unsafe { (self.last_error_message)().as_ref().map(|text| CStr::from_ptr(text)) };
        LibvirtError::Reported(message.map_or_else(|| "unknown error".into(), |text| text.to_string_lossy().into()))
    }

    pub(super) fn object(&self, object: Object) -> Result<NonNull<c_void>, LibvirtError> {
        NonNull::new(object).ok_or_else(|| self.last_error())
    }
}
