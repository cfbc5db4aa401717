//! A QMP connection through libvirt.
//!
//! libvirt holds the monitor of its QEMUs, and a monitor serves one client. libvirt passes commands on. A thread at
//! the other end of a socket pair presents that as a monitor, so that [`Qmp`] can use it. The thread alone calls
//! libvirt: a call without an answer blocks the thread, and [`Qmp`] has a limit for each reply.
//!
//! libvirt reports QEMU's events, too, but not before the reply to the command that caused them. Only two are passed
//! on, with QEMU's times, except for the `STOP` of a `stop`: it has the time at which `stop` was sent, because nothing waits
//! for the event while the guest is stopped. Therefore a measured pause is never shorter than the actual one.
//!
//! Overlays on disks are not put by commands to QEMU, of which libvirt would not know, but by libvirt's own calls. The
//! relay has a command for each of them ([`LibvirtCall`]).
//!
//! The relay belongs to one *instance* of the domain: the QEMU that ran when it was opened. If the domain is destroyed and
//! started again, commands fail instead of reaching the new QEMU.

use crate::devices::SAVE_DEVICES;
use crate::qmp::{LIBVIRT_ERROR_CLASS, Qmp, QmpError};
use rekindle_kernel::libvirt_client::{BlockCommit, Connection, Domain, LibvirtError, MonitorEvent, Subscription};
use rekindle_kernel::process::Process;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Limit for opening a connection. libvirt itself waits up to 30 s for another command to end.
const OPEN_TIMEOUT: Duration = Duration::from_secs(40);
/// How long a daemon that has ended may take to be started again. The client of the relay waits longer for a reply.
const RESTART_TIMEOUT: Duration = Duration::from_secs(20);
const RESTART_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Limit for the event that follows a successful `cont`. It usually arrives within a millisecond of the reply.
const EVENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The events that the relay uses.
const EVENTS: &[&str] = &["STOP", "RESUME"];
/// Limit of the events that wait. The relay reads them during a pause, in which QEMU sends two, and a few more if other
/// clients stop and resume the guest meanwhile.
const MAX_EVENTS: usize = 64;

/// Connects to the QEMU of a libvirt domain.
///
/// # Errors
/// [`QmpError::Libvirt`] with libvirt's message.
pub fn connect(domain: &str, uri: Option<&str>, timeout: Duration) -> Result<Qmp, QmpError> {
    let failed = |message: String| QmpError::Libvirt { domain: domain.into(), message };
    let (client_end, monitor_end) = UnixStream::pair().map_err(|e| failed(e.to_string()))?;
    let (result_sender, result) = channel();
    let (domain_name, uri) = (domain.to_owned(), uri.map(str::to_owned));
    let serve = move || match Relay::open(domain_name, uri) {
        Ok((relay, version)) => {
            if result_sender.send(Ok(())).is_ok() {
                relay.serve(&monitor_end, &version);
            }
        }
        Err(message) => drop(result_sender.send(Err(message))),
    };
    thread::Builder::new().name("libvirt".into()).spawn(serve).map_err(|e| failed(e.to_string()))?;
    let no_answer = |_| failed(format!("libvirt has not answered for {} s", OPEN_TIMEOUT.as_secs()));
    result.recv_timeout(OPEN_TIMEOUT).map_err(no_answer)?.map_err(failed)?;
    Qmp::over(client_end, timeout)
}

/// Returns the XML of a running domain for another libvirt, through a connection of [`connect`].
///
/// # Errors
/// When libvirt does not answer, or rejects it.
pub fn portable_xml(qmp: &mut Qmp) -> Result<String, QmpError> {
    qmp.execute(CALL, LibvirtCall::PortableXml)
}

/// The relay's command for a call of libvirt, which no QEMU has.
const CALL: &str = "rekindle-libvirt-call";
/// Class of an error that libvirt has reported for a [`LibvirtCall`]: it has the connection, and rejects the call.
const REJECTED_CLASS: &str = "libvirt call";

/// A call of libvirt on the domain.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub(crate) enum LibvirtCall {
    /// Returns the XML as text.
    Xml {
        inactive: bool,
    },
    /// Returns the XML for another libvirt as text.
    PortableXml,
    PutOverlays {
        xml: String,
    },
    StartCommit {
        disk: String,
        base: String,
        top: Option<String>,
        speed: u64,
    },
    EndBlockJob {
        disk: String,
        pivot: bool,
    },
}

impl LibvirtCall {
    /// Makes the call through a connection of [`connect`].
    ///
    /// # Errors
    /// [`QmpError::Refused`] if libvirt rejects it.
    pub(crate) fn make(&self, qmp: &mut Qmp) -> Result<Value, QmpError> {
        qmp.execute(CALL, self)
    }

    fn on(&self, domain: &Domain) -> Result<Value, LibvirtError> {
        match self {
            Self::Xml { inactive } => domain.xml(*inactive).map(Value::from),
            Self::PortableXml => domain.portable_xml().map(Value::from),
            Self::PutOverlays { xml } => domain.put_overlays(xml).map(Value::from),
            Self::StartCommit { disk, base, top, speed } => {
                let (disk, base, top) = (disk.clone(), base.clone(), top.clone());
                domain.start_commit(&BlockCommit { disk, base, top, speed: *speed }).map(Value::from)
            }
            Self::EndBlockJob { disk, pivot } => domain.end_block_job(disk, *pivot).map(Value::from),
        }
    }
}

/// A domain to which a connection is open.
struct OpenDomain {
    /// `None` before the first command that needs them.
    events: Option<DomainEvents>,
    domain: Domain,
    connection: Arc<Connection>,
}

/// The events of a domain.
struct DomainEvents {
    /// Ends before its connection.
    _subscription: Subscription,
    received: Receiver<MonitorEvent>,
    /// Has no other calls. libvirt 9.0 can end with a segmentation fault if a client that has subscribed to events is killed
    /// while one of its calls is served. For the same reason only connections that need events subscribe to them.
    connection: Arc<Connection>,
}

impl OpenDomain {
    /// Connects to the libvirt at `uri`, and finds the domain.
    fn of(uri: Option<&str>, name: &str) -> Result<Self, LibvirtError> {
        let connection = Arc::new(Connection::open(uri)?);
        Ok(Self { events: None, domain: connection.lookup(name)?, connection })
    }

    /// Subscribes to the domain's events, unless that was done.
    fn subscribe(&mut self, uri: Option<&str>) -> Result<(), LibvirtError> {
        if self.events.is_none() {
            let connection = Arc::new(Connection::open(uri)?);
            let (sender, received) = sync_channel(MAX_EVENTS);
            let subscription = connection.lookup(&self.domain.uuid()?)?.subscribe(EVENTS, sender)?;
            self.events = Some(DomainEvents { _subscription: subscription, received, connection });
        }
        Ok(())
    }

    fn received(&self) -> Option<&Receiver<MonitorEvent>> {
        self.events.as_ref().map(|events| &events.received)
    }

    /// Returns whether the daemon has closed no connection.
    fn is_connected(&self) -> bool {
        self.connection.is_alive() && self.events.as_ref().is_none_or(|events| events.connection.is_alive())
    }

    /// Returns the number of the thread of QEMU's first virtual processor, which cannot be unplugged.
    fn first_thread(&self) -> Result<u32, LibvirtError> {
        let reply = self.domain.monitor(r#"{"execute":"query-cpus-fast"}"#, &[])?;
        let thread = serde_json::from_str::<Value>(&reply).ok().and_then(|reply| {
            let mut processors = reply.get("return")?.as_array()?.iter();
            let first = processors.find(|processor| processor.get("cpu-index").and_then(Value::as_u64) == Some(0))?;
            u32::try_from(first.get("thread-id")?.as_u64()?).ok()
        });
        thread.ok_or(LibvirtError::Reported(reply))
    }
}

/// Identifies the QEMU that ran when the relay was opened.
struct Instance {
    uuid: String,
    first_thread: u32,
    /// That thread, if it is visible: it is not on another host or in another PID namespace.
    thread: Option<Process>,
}

impl Instance {
    fn of(open: &OpenDomain) -> Result<Self, LibvirtError> {
        let first_thread = open.first_thread()?;
        Ok(Self { uuid: open.domain.uuid()?, first_thread, thread: Process::of(first_thread).ok() })
    }

    /// Rejects a command if the instance has ended.
    fn check(&self) -> Result<(), LibvirtError> {
        match &self.thread {
            Some(thread) if !thread.is_alive() => Err(LibvirtError::Reported(INSTANCE_ENDED.into())),
            _ => Ok(()),
        }
    }

    /// Rejects a connection to another instance of the domain.
    fn check_same(&self, open: &OpenDomain) -> Result<(), LibvirtError> {
        self.check()?;
        let is_same = open.domain.uuid()? == self.uuid && open.first_thread()? == self.first_thread;
        if is_same { Ok(()) } else { Err(LibvirtError::Reported(INSTANCE_ENDED.into())) }
    }
}

const INSTANCE_ENDED: &str = "the QEMU of the domain has ended; if the domain was started again, another one runs it";

/// Passes the commands of a QMP client on to libvirt.
struct Relay {
    name: String,
    uri: Option<String>,
    open: OpenDomain,
    instance: Instance,
    /// When the last `stop` was sent, since 1970; none after `cont`.
    stop_sent: Option<Moment>,
    /// Whether the connection was opened again since the last `stop`, so that events may be missing.
    may_miss_events: bool,
}

impl Relay {
    /// Also returns QEMU's version.
    fn open(name: String, uri: Option<String>) -> Result<(Self, Value), String> {
        let open = OpenDomain::of(uri.as_deref(), &name).map_err(|e| e.to_string())?;
        let reply = open.domain.monitor(r#"{"execute":"query-version"}"#, &[]).map_err(|e| e.to_string())?;
        let instance = Instance::of(&open).map_err(|e| e.to_string())?;
        let relay = Self { name, uri, open, instance, stop_sent: None, may_miss_events: false };
        let version = serde_json::from_str::<Value>(&reply).ok().and_then(|reply| reply.get("return").cloned());
        Ok((relay, version.ok_or(reply)?))
    }

    /// Returns QEMU's reply. The connection is opened again if the daemon has closed it (a restart), and a command that
    /// `is_repeatable` is then sent again.
    fn execute(&mut self, command: &str, is_repeatable: bool, fd: Option<OwnedFd>) -> Result<String, LibvirtError> {
        self.connect()?;
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        let reply = self.open.domain.monitor(command, &fds);
        if reply.is_err() && is_repeatable && !self.open.is_connected() {
            self.reopen()?;
            return self.open.domain.monitor(command, &fds);
        }
        reply
    }

    /// Makes a call and returns the line of its reply. It is not repeated: it may have taken effect.
    fn call(&mut self, call: &LibvirtCall) -> String {
        if let Err(e) = self.connect() {
            return error_line(&e.to_string());
        }
        match call.on(&self.open.domain) {
            Ok(value) => json!({"return": value}).to_string(),
            Err(e) if self.open.is_connected() => {
                json!({"error": {"class": REJECTED_CLASS, "desc": e.to_string()}}).to_string()
            }
            Err(e) => error_line(&e.to_string()),
        }
    }

    /// Connects again if the daemon has closed a connection.
    fn connect(&mut self) -> Result<(), LibvirtError> {
        self.instance.check()?;
        if self.open.is_connected() { Ok(()) } else { self.reopen() }
    }

    /// Connects to a daemon that is being started again. The guest may be stopped meanwhile, and only a connection can
    /// resume it.
    fn reopen(&mut self) -> Result<(), LibvirtError> {
        let deadline = Instant::now() + RESTART_TIMEOUT;
        let open = loop {
            // A daemon that has just been started may accept connections before it has found its domains.
            let opened = OpenDomain::of(self.uri.as_deref(), &self.instance.uuid).and_then(|mut open| {
                self.instance.check_same(&open)?;
                if self.open.events.is_some() {
                    open.subscribe(self.uri.as_deref())?;
                }
                Ok(open)
            });
            match opened {
                Ok(open) => break open,
                Err(e) if Instant::now() >= deadline => return Err(e),
                Err(_) => thread::sleep(RESTART_POLL_INTERVAL),
            }
            self.instance.check()?;
        };
        (self.open, self.may_miss_events) = (open, true);
        Ok(())
    }

    /// Answers as the monitor at the other end of `socket`, until that is closed.
    fn serve(mut self, socket: &UnixStream, version: &Value) {
        let mut out = socket;
        let greeting = json!({"QMP": {"version": version, "capabilities": []}});
        let mut commands = CommandReader { socket, unread: Vec::new(), fds: Vec::new() };
        if writeln!(out, "{greeting}").is_err() {
            return;
        }
        while let Some(ReceivedCommand { command, fd }) = commands.next() {
            for line in self.answer(&command, fd) {
                if writeln!(out, "{line}").is_err() {
                    if is_stop(&command) {
                        self.undo_stop();
                    }
                    return;
                }
            }
        }
    }

    /// Resumes the guest after a `stop` whose reply the client has not waited for: it does not know that the guest is
    /// stopped, so no other process resumes it.
    fn undo_stop(&mut self) {
        if self.stop_sent.take().is_some()
            && let Err(e) = self.execute(r#"{"execute":"cont"}"#, true, None)
        {
            tracing::warn!("the guest of {} may be stopped: {e}", self.name);
        }
    }

    /// Returns the lines that a monitor would write for a command.
    fn answer(&mut self, command: &Value, fd: Option<OwnedFd>) -> Vec<String> {
        let name = command.get("execute").and_then(Value::as_str).unwrap_or_default();
        if name == "qmp_capabilities" {
            return vec![reply_to(command)];
        }
        if name == CALL {
            let arguments = command.get("arguments").cloned().unwrap_or_default();
            return match serde_json::from_value(arguments) {
                Ok(call) => vec![self.call(&call)],
                Err(e) => vec![error_line(&e.to_string())],
            };
        }
        if name == "cont" && self.may_miss_events && self.stop_sent.is_some() {
            match self.execute(r#"{"execute":"query-status"}"#, true, None) {
                Ok(status) if is_running(&status) => return vec![error_line(RESUMED_BY_ANOTHER)],
                _ => {}
            }
        }
        // Outside of a pause, it stops and resumes the guest: `piped_save`.
        let is_pause = name == SAVE_DEVICES && self.stop_sent.is_none();
        if matches!(name, "stop" | "cont") || is_pause {
            let ready = self.connect().and_then(|()| self.open.subscribe(self.uri.as_deref()));
            if let Err(e) = ready {
                return vec![error_line(&e.to_string())];
            }
        }
        if name == "stop" || is_pause {
            // Only what happens from now on matters, and its events need room.
            while self.open.received().is_some_and(|events| events.try_recv().is_ok()) {}
        }
        let sent = Moment::now();
        let is_repeatable = matches!(name, "stop" | "cont") || name.starts_with("query-");
        let reply = match self.execute(&command.to_string(), is_repeatable, fd) {
            Ok(reply) => reply,
            Err(e) => return vec![error_line(&e.to_string())],
        };
        if !serde_json::from_str::<Value>(&reply).is_ok_and(|reply| reply.get("return").is_some()) {
            return vec![reply];
        }
        match name {
            "stop" => {
                (self.stop_sent, self.may_miss_events) = (Some(sent), false);
                vec![event_line("STOP", sent.host), reply]
            }
            "cont" => {
                let stop_sent = self.stop_sent.take().unwrap_or(sent);
                let resumed = self.open.received().map(|events| wait_resumed(events, stop_sent, sent));
                match resumed.unwrap_or_else(|| Err("libvirt's events are not received".into())) {
                    Ok(time) => vec![event_line("RESUME", time), reply],
                    Err(message) => vec![error_line(&message)],
                }
            }
            _ if is_pause => {
                let mut lines = self.open.received().map(|events| pause_events(events, sent)).unwrap_or_default();
                lines.push(reply);
                lines
            }
            _ => vec![reply],
        }
    }
}

/// A moment, by the host's clock, which events have, and by one that cannot be set.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// Since 1970.
    host: Duration,
    steady: Instant,
}

impl Moment {
    fn now() -> Self {
        Self { host: since_1970(), steady: Instant::now() }
    }

    /// Returns whether the host's clock was set back since then, so that its times of events may be too small.
    fn was_clock_set_back(&self) -> bool {
        let now = Self::now();
        let expected = self.host + now.steady.saturating_duration_since(self.steady);
        expected.saturating_sub(now.host) >= MIN_CLOCK_STEP
    }
}

/// Smaller differences of the two clocks are no step of the host's clock.
const MIN_CLOCK_STEP: Duration = Duration::from_secs(1);

const CLOCK_SET_BACK: &str = "the host's clock was set back while the guest was stopped, so it is unknown whether another \
                              client of libvirt has resumed it meanwhile; the guest runs";

const RESUMED_BY_ANOTHER: &str =
    "the guest runs already: another client of libvirt has resumed it while it was kept stopped";

/// Returns the lines of the events since `sent`, until the first `RESUME`. They have QEMU's times.
fn pause_events(events: &Receiver<MonitorEvent>, sent: Moment) -> Vec<String> {
    let deadline = Instant::now() + EVENT_TIMEOUT;
    let mut lines = Vec::new();
    while let Ok(event) = events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        // Events have microseconds.
        if event.time.as_micros() >= sent.host.as_micros() || sent.was_clock_set_back() {
            lines.push(event_line(&event.name, event.time));
            if event.name == "RESUME" {
                break;
            }
        }
    }
    lines
}

/// Returns the time of the first `RESUME` since `stop_sent`.
///
/// # Errors
/// If it is of a time before `cont_sent`: another client has resumed the guest while it was kept stopped. Also if that is
/// unknown, because the host's clock was set back.
fn wait_resumed(events: &Receiver<MonitorEvent>, stop_sent: Moment, cont_sent: Moment) -> Result<Duration, String> {
    let deadline = Instant::now() + EVENT_TIMEOUT;
    loop {
        let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let event = event.map_err(|_| "libvirt has not reported that the guest was resumed".to_owned())?;
        // Events have microseconds.
        let is_before_cont = event.time.as_micros() < cont_sent.host.as_micros();
        match event.name.as_str() {
            "RESUME" if stop_sent.was_clock_set_back() => return Err(CLOCK_SET_BACK.into()),
            "RESUME" if event.time < stop_sent.host => {}
            "RESUME" if is_before_cont => return Err(RESUMED_BY_ANOTHER.into()),
            "RESUME" => return Ok(event.time),
            _ => {}
        }
    }
}

/// Returns the time of the host's clock.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the line of an empty reply with the `id` of `command`, as QEMU gives it.
fn reply_to(command: &Value) -> String {
    json!({"return": {}, "id": command.get("id")}).to_string()
}

/// Returns the line of an error reply of the relay, which [`Qmp`] does not take for QEMU's.
fn error_line(text: &str) -> String {
    json!({"error": {"class": LIBVIRT_ERROR_CLASS, "desc": text}}).to_string()
}

fn event_line(name: &str, since_1970: Duration) -> String {
    let timestamp = json!({"seconds": since_1970.as_secs(), "microseconds": since_1970.subsec_micros()});
    json!({"event": name, "timestamp": timestamp}).to_string()
}

/// Returns whether the guest runs, according to QEMU's reply to `query-status`.
fn is_running(status: &str) -> bool {
    let status: Option<Value> = serde_json::from_str(status).ok();
    status.and_then(|status| status.pointer("/return/running")?.as_bool()) == Some(true)
}

fn is_stop(command: &Value) -> bool {
    command.get("execute").and_then(Value::as_str) == Some("stop")
}

/// A command of the client, with the descriptor that arrived with it.
struct ReceivedCommand {
    command: Value,
    fd: Option<OwnedFd>,
}

/// Reads commands from a socket, each from its first brace to its last.
struct CommandReader<'a> {
    socket: &'a UnixStream,
    unread: Vec<u8>,
    /// Descriptors of a command that is not complete yet.
    fds: Vec<OwnedFd>,
}

impl CommandReader<'_> {
    /// Returns the next command; `None` if the client has closed the socket, or sends something else.
    fn next(&mut self) -> Option<ReceivedCommand> {
        loop {
            let mut values = serde_json::Deserializer::from_slice(&self.unread).into_iter::<Value>();
            match values.next() {
                Some(Ok(command)) => {
                    let end = values.byte_offset();
                    self.unread.drain(..end);
                    return Some(ReceivedCommand { command, fd: self.fds.pop() });
                }
                Some(Err(e)) if !e.is_eof() => return None,
                _ => self.receive()?,
            }
        }
    }

    /// Receives some bytes and descriptors; `None` if the client has closed the socket.
    fn receive(&mut self) -> Option<()> {
        let mut chunk = [0; 8192];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut chunk)];
        let count = match recvmsg(self.socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes > 0 => received.bytes,
            Err(Errno::INTR) => 0,
            _ => return None,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        self.unread.extend_from_slice(chunk.get(..count).unwrap_or_default());
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_at_its_last_brace() {
        let (client_end, monitor_end) = UnixStream::pair().unwrap();
        let mut client = &client_end;
        client.write_all(br#"{"execute":"a"}{"execute":"b","arguments":{"x":"#).unwrap();
        let mut commands = CommandReader { socket: &monitor_end, unread: Vec::new(), fds: Vec::new() };
        assert_eq!(commands.next().unwrap().command["execute"], "a");
        client.write_all(br#""}"}}"#).unwrap();
        let ReceivedCommand { command, fd } = commands.next().unwrap();
        assert_eq!(command["arguments"]["x"], "}");
        assert!(fd.is_none());
        drop(client_end);
        assert!(commands.next().is_none());
    }

    #[test]
    fn an_instance_whose_qemu_has_ended_gets_no_commands() {
        let thread = Process::current().unwrap();
        let instance = |thread| Instance { uuid: String::new(), first_thread: 1, thread };
        instance(Some(thread)).check().unwrap();
        instance(None).check().unwrap();
        // Another process or thread has the number now.
        let e = instance(Some(Process { started: thread.started + 1, ..thread })).check().unwrap_err();
        assert!(e.to_string().contains("started again"), "{e}");
    }

    #[test]
    fn an_error_of_libvirt_is_not_taken_for_one_of_qemu() {
        let (client_end, monitor_end) = UnixStream::pair().unwrap();
        let serve = thread::spawn(move || {
            let mut out = &monitor_end;
            let version = json!({"qemu": {"major": 10, "minor": 0, "micro": 2}});
            writeln!(out, "{}", json!({"QMP": {"version": version}})).unwrap();
            let mut commands = CommandReader { socket: &monitor_end, unread: Vec::new(), fds: Vec::new() };
            let negotiation = commands.next().unwrap().command;
            writeln!(out, "{}", reply_to(&negotiation)).unwrap();
            commands.next().unwrap();
            writeln!(out, "{}", error_line("the daemon has ended")).unwrap();
        });
        let mut qmp = Qmp::over(client_end, Duration::from_secs(30)).unwrap();
        let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
        assert!(e.is_of_libvirt() && matches!(e, QmpError::NotPassedOn { .. }), "{e}");
        assert_eq!(e.to_string(), "cannot run `query-status` through libvirt: the daemon has ended");
        serve.join().unwrap();
    }

    #[test]
    fn the_run_state_is_read_from_the_reply() {
        assert!(is_running(r#"{"return":{"status":"running","running":true},"id":"libvirt-1"}"#));
        assert!(!is_running(r#"{"return":{"status":"paused","running":false}}"#));
        assert!(!is_running("{}") && !is_running(""));
    }

    #[test]
    fn a_resume_by_another_client_is_detected() {
        let at = |ms| Duration::from_millis(ms);
        let resumed = |ms| MonitorEvent { name: "RESUME".into(), time: at(ms) };
        let stopped = |ms| MonitorEvent { name: "STOP".into(), time: at(ms) };
        let first_resume = |events: &[MonitorEvent]| {
            let (sender, receiver) = channel();
            events.iter().for_each(|event| sender.send(event.clone()).unwrap());
            let sent = |host| Moment { host, steady: Instant::now() };
            wait_resumed(&receiver, sent(at(10)), sent(at(20)))
        };
        assert_eq!(first_resume(&[resumed(9), stopped(10), resumed(21)]).unwrap(), at(21));
        let e = first_resume(&[stopped(10), resumed(12), stopped(21), resumed(21)]).unwrap_err();
        assert!(e.contains("another client"), "{e}");
        let e = first_resume(&[stopped(10)]).unwrap_err();
        assert!(e.contains("has not reported"), "{e}");
    }

    #[test]
    fn events_are_not_ignored_if_the_hosts_clock_was_set_back_after_the_command() {
        let now = Moment::now();
        let a_year_ahead = Moment { host: now.host + Duration::from_secs(365 * 86_400), ..now };
        let events = || {
            let (sender, receiver) = channel();
            for name in ["STOP", "RESUME"] {
                sender.send(MonitorEvent { name: name.into(), time: now.host }).unwrap();
            }
            receiver
        };
        assert_eq!(pause_events(&events(), a_year_ahead).len(), 2);
        let e = wait_resumed(&events(), a_year_ahead, now).unwrap_err();
        assert!(e.contains("clock was set back"), "{e}");
        assert_eq!(wait_resumed(&events(), now, now).unwrap(), now.host);
    }

    #[test]
    fn an_inaccessible_domain_is_reported_with_libvirts_error() {
        // libvirt's built-in test driver has a domain of this name, and no monitor.
        let e = connect("test", Some("test:///default"), Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("not supported by the connection driver"), "{e}");
        let e = connect("it's none", Some("test:///default"), Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("it's none"), "{e}");
    }
}
