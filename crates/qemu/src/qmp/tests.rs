//! The client against a simulated monitor.

use super::*;
use std::io::Write;
use std::thread;

const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "x"}, "capabilities": ["oob"]}}"#;

/// Simulates a monitor that answers each command with the next of `answers`.
fn monitor(answers: &'static [&'static str]) -> Result<Qmp, QmpError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        writeln!(out, "{GREETING}").unwrap();
        // Like QEMU's parser, this one takes a command at its closing brace, without a line end.
        let mut commands = serde_json::Deserializer::from_reader(theirs).into_iter::<Value>();
        commands.next().unwrap().unwrap();
        writeln!(out, r#"{{"return": {{}}}}"#).unwrap();
        for answer in answers {
            if commands.next().is_none() {
                return;
            }
            // Two writes: a line may arrive in pieces.
            let (a, b) = answer.split_at(answer.len() / 2);
            out.write_all(a.as_bytes()).unwrap();
            writeln!(out, "{b}").unwrap();
        }
    });
    Qmp::over(ours, Duration::from_secs(10))
}

#[test]
fn a_staged_command_is_answered_when_it_is_fired() {
    let mut qmp = monitor(&[r#"{"return": 1}"#, r#"{"return": 2}"#]).unwrap();
    qmp.stage("first", serde_json::json!({"filename": "x"})).unwrap();
    assert_eq!(qmp.try_reply::<u32>("first").unwrap(), None);
    qmp.fire("first").unwrap();
    assert_eq!(qmp.reply::<u32>("first").unwrap(), 1);
    assert_eq!(qmp.execute::<u32>("second", ()).unwrap(), 2);
}

#[test]
fn events_between_are_kept_with_their_time() {
    let mut qmp = monitor(&[concat!(
        r#"{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "STOP"}"#,
        "\n",
        r#"{"return": {"status": "paused"}}"#
    )])
    .unwrap();
    assert_eq!(qmp.version().to_string(), "10.0.2");
    let status: Value = qmp.execute("query-status", ()).unwrap();
    assert_eq!(status["status"], "paused");
    let stop = qmp.wait_event("STOP", Duration::ZERO, |e| (e.name == "STOP").then_some(e.host_us)).unwrap();
    assert_eq!(stop, 7_000_005);
}

#[test]
fn a_refusal_carries_qemus_words() {
    let mut qmp = monitor(&[r#"{"error": {"class": "CommandNotFound", "desc": "no such thing"}}"#]).unwrap();
    let e = qmp.execute::<Value>("xyz", ()).unwrap_err();
    assert_eq!(e.to_string(), "QEMU refused `xyz`: no such thing");
}

#[test]
fn a_closed_socket_is_reported_with_the_command() {
    let mut qmp = monitor(&[]).unwrap();
    let e = qmp.execute::<Value>("quit", ()).unwrap_err();
    assert!(matches!(&e, QmpError::Closed { during } if during == "quit"), "{e}");
}

#[test]
fn nonsense_is_shown() {
    let mut qmp = monitor(&["nonsense"]).unwrap();
    let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
    assert!(e.to_string().contains("nonsense"), "{e}");
}

#[test]
fn a_busy_socket_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp.sock");
    let e = Qmp::connect(&path, Duration::from_millis(5)).unwrap_err();
    assert!(e.to_string().contains("qmp.sock"), "{e}");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let e = Qmp::connect(&path, Duration::from_millis(5)).unwrap_err();
    assert!(matches!(e, QmpError::NoGreeting { .. }), "{e}");
}

#[test]
fn a_listener_that_does_not_accept_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp.sock");
    // No connection is accepted, and the queue is as short as QEMU's.
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let within = Duration::from_millis(50);
    let e = Qmp::connect(&path, within).unwrap_err();
    assert!(matches!(e, QmpError::NoGreeting { after, .. } if after == within), "{e}");
}

/// Simulates a QEMU that greets, accepts `qmp_capabilities`, and then runs `then` with its end of the socket.
fn qemu(then: impl FnOnce(UnixStream) + Send + 'static) -> Qmp {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        writeln!(out, "{GREETING}").unwrap();
        let mut commands = serde_json::Deserializer::from_reader(&theirs).into_iter::<Value>();
        commands.next().unwrap().unwrap();
        writeln!(out, r#"{{"return": {{}}}}"#).unwrap();
        drop(commands);
        then(out);
    });
    Qmp::over(ours, Duration::from_secs(10)).unwrap()
}

/// An event that a guest can cause.
const CAUSED: &str = r#"{"timestamp": {"seconds": 18446744073709551615, "microseconds": 5}, "event": "RTC_CHANGE", "data": {"offset": 1}}"#;

#[test]
fn events_without_an_end_are_no_answer_and_take_no_memory() {
    // Several writers keep the socket from becoming empty. A write as small as this one is not torn.
    let mut qmp = qemu(|out| {
        let event = format!("{CAUSED}\n");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while (&out).write_all(event.as_bytes()).is_ok() {});
            }
        });
    });
    qmp.timeout = Duration::from_millis(300);
    let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
    assert!(matches!(&e, QmpError::Timeout { during, .. } if during == "query-status"), "{e}");
    assert!(qmp.kept_events().count() <= 64);
    assert_eq!(qmp.try_reply::<Value>("query-status").unwrap(), None, "one read ends");
    let e = qmp.wait_event("STOP", Duration::from_millis(50), |e| (e.name == "STOP").then_some(())).unwrap_err();
    assert!(matches!(e, QmpError::Timeout { .. }), "{e}");
}

#[test]
fn events_that_a_guest_causes_do_not_push_out_others() {
    let mut qmp = qemu(|mut out| {
        writeln!(out, r#"{{"timestamp": {{"seconds": 1, "microseconds": 0}}, "event": "STOP"}}"#).unwrap();
        for _ in 0..5000 {
            writeln!(out, "{CAUSED}").unwrap();
        }
        writeln!(out, r#"{{"return": 7}}"#).unwrap();
    });
    assert_eq!(qmp.execute::<u32>("x", ()).unwrap(), 7);
    qmp.wait_event("STOP", Duration::ZERO, |e| (e.name == "STOP").then_some(())).unwrap();
}

#[test]
fn an_answer_without_an_end_takes_no_more_memory_than_its_limit() {
    let mut qmp = qemu(|mut out| {
        let _ = out.write_all(br#"{"return": ""#);
        while out.write_all(&[b'x'; 65536]).is_ok() {}
    });
    let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
    assert!(matches!(&e, QmpError::TooLong { .. }), "{e}");
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_the_next_one() {
    let (timed_out, wait) = std::sync::mpsc::channel();
    let mut qmp = qemu(move |mut out| {
        wait.recv().unwrap();
        writeln!(out, r#"{{"return": "late"}}"#).unwrap();
        writeln!(out, r#"{{"return": "in time"}}"#).unwrap();
        let _ = std::io::copy(&mut out, &mut std::io::sink());
    });
    qmp.timeout = Duration::from_millis(20);
    assert!(matches!(qmp.execute::<Value>("first", ()), Err(QmpError::Timeout { .. })));
    qmp.timeout = Duration::from_secs(10);
    timed_out.send(()).unwrap();
    assert_eq!(qmp.execute::<String>("second", ()).unwrap(), "in time");
}
