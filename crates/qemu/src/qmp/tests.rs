//! The client against a simulated monitor.

use super::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use std::io::Write;
use std::thread;

const WELCOME: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "x"}, "capabilities": ["oob"]}}"#;

/// Simulates a QEMU that greets, accepts `qmp_capabilities`, and then runs `serve` with its end of the socket.
fn qemu(serve: impl FnOnce(UnixStream) + Send + 'static) -> Qmp {
    qemu_after_another_client(&[], &[], serve).unwrap()
}

/// Like [`qemu`], but sends the lines `before_greeting` and `before_reply`, as if they were for a client before.
fn qemu_after_another_client(
    before_greeting: &'static [&'static str],
    before_reply: &'static [&'static str],
    serve: impl FnOnce(UnixStream) + Send + 'static,
) -> Result<Qmp, QmpError> {
    let (client_end, qemu_end) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut out = qemu_end.try_clone().unwrap();
        for line in before_greeting.iter().chain(&[WELCOME]) {
            writeln!(out, "{line}").unwrap();
        }
        let mut commands = serde_json::Deserializer::from_reader(&qemu_end).into_iter::<Value>();
        let negotiation = commands.next().unwrap().unwrap();
        for line in before_reply {
            writeln!(out, "{line}").unwrap();
        }
        writeln!(out, "{}", serde_json::json!({"return": {}, "id": negotiation["id"]})).unwrap();
        drop(commands);
        serve(out);
    });
    Qmp::over(client_end, Duration::from_secs(10))
}

/// Simulates a QEMU that answers each command with the next of `answers`.
fn qemu_with_answers(answers: &'static [&'static str]) -> Qmp {
    qemu(|out| answer_each(out, answers))
}

/// Answers each command with the next of `answers`.
fn answer_each(mut out: UnixStream, answers: &[&str]) {
    // Like QEMU's parser, this one takes a command at its closing brace, without a line end.
    let mut commands = serde_json::Deserializer::from_reader(out.try_clone().unwrap()).into_iter::<Value>();
    for answer in answers {
        if commands.next().is_none() {
            return;
        }
        // Two writes: a line may arrive in pieces.
        let (first_half, second_half) = answer.split_at(answer.len() / 2);
        out.write_all(first_half.as_bytes()).unwrap();
        writeln!(out, "{second_half}").unwrap();
    }
}

#[test]
fn what_qemu_sends_to_a_client_before_is_not_taken_for_an_answer() {
    const STOP: &str = r#"{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "STOP"}"#;
    const REPLIES: &[&str] = &[
        STOP,
        r#"{"return": {}}"#,
        r#"{"return": {}, "id": "libvirt-7"}"#,
        r#"{"error": {"class": "GenericError", "desc": "x"}}"#,
    ];
    for (before_greeting, before_reply) in [(REPLIES, REPLIES), (REPLIES, &[]), (&[], REPLIES)] {
        let serve = |out| answer_each(out, &[r#"{"return": 1}"#]);
        let mut qmp = qemu_after_another_client(before_greeting, before_reply, serve).unwrap();
        assert_eq!(qmp.execute::<u32>("first", ()).unwrap(), 1);
        assert_eq!(qmp.kept_events().count(), 0);
    }
}

#[test]
fn a_staged_command_is_answered_when_it_is_fired() {
    let mut qmp = qemu_with_answers(&[r#"{"return": 1}"#, r#"{"return": 2}"#]);
    qmp.stage("first", serde_json::json!({"filename": "x"})).unwrap();
    assert_eq!(qmp.try_reply::<u32>("first").unwrap(), None);
    qmp.fire("first").unwrap();
    assert_eq!(qmp.reply::<u32>("first").unwrap(), 1);
    assert_eq!(qmp.execute::<u32>("second", ()).unwrap(), 2);
}

#[test]
fn events_between_are_kept_with_their_time() {
    let mut qmp = qemu_with_answers(&[concat!(
        r#"{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "STOP"}"#,
        "\n",
        r#"{"return": {"status": "paused"}}"#
    )]);
    assert_eq!(qmp.version().to_string(), "10.0.2");
    let status: Value = qmp.execute("query-status", ()).unwrap();
    assert_eq!(status["status"], "paused");
    let stop = qmp.wait_event("STOP", Duration::ZERO, |e| (e.name == "STOP").then_some(e.host_us)).unwrap();
    assert_eq!(stop, 7_000_005);
}

#[test]
fn a_refusal_has_the_text_of_qemu() {
    let mut qmp = qemu_with_answers(&[r#"{"error": {"class": "CommandNotFound", "desc": "no such thing"}}"#]);
    let e = qmp.execute::<Value>("xyz", ()).unwrap_err();
    assert_eq!(e.to_string(), "QEMU refused `xyz`: no such thing");
}

#[test]
fn a_closed_socket_is_reported_with_the_command() {
    let mut qmp = qemu_with_answers(&[]);
    let e = qmp.execute::<Value>("quit", ()).unwrap_err();
    assert!(matches!(&e, QmpError::Closed { during } if during == "quit"), "{e}");
}

#[test]
fn an_answer_that_is_not_json_is_shown() {
    let mut qmp = qemu_with_answers(&["nonsense"]);
    let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
    assert!(e.to_string().contains("nonsense"), "{e}");
}

#[test]
fn a_missing_and_a_busy_socket_are_named() {
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
    let timeout = Duration::from_millis(50);
    let e = Qmp::connect(&path, timeout).unwrap_err();
    assert!(matches!(e, QmpError::NoGreeting { after, .. } if after == timeout), "{e}");
}

/// An event that a guest can cause.
const GUEST_EVENT: &str = r#"{"timestamp": {"seconds": 18446744073709551615, "microseconds": 5}, "event": "RTC_CHANGE", "data": {"offset": 1}}"#;

#[test]
fn an_endless_series_of_events_is_no_answer_and_takes_no_memory() {
    // Several writers keep the socket from becoming empty. A write as small as this one is not torn.
    let mut qmp = qemu(|out| {
        let event = format!("{GUEST_EVENT}\n");
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
fn events_that_a_guest_causes_do_not_displace_others() {
    let mut qmp = qemu(|mut out| {
        writeln!(out, r#"{{"timestamp": {{"seconds": 1, "microseconds": 0}}, "event": "STOP"}}"#).unwrap();
        for _ in 0..5000 {
            writeln!(out, "{GUEST_EVENT}").unwrap();
        }
        writeln!(out, r#"{{"return": 7}}"#).unwrap();
    });
    assert_eq!(qmp.execute::<u32>("x", ()).unwrap(), 7);
    qmp.wait_event("STOP", Duration::ZERO, |e| (e.name == "STOP").then_some(())).unwrap();
}

#[test]
fn an_endless_answer_takes_no_more_memory_than_its_limit() {
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
