//! Several calls in one stop, and the errors that name why a call was not made.

use super::*;

#[test]
fn several_calls_in_one_stop_and_the_error_of_one() {
    let victim = Victim::start("read");
    let injector = victim.injector();
    let e = injector
        .run(|stopped_thread| {
            assert_eq!(stopped_thread.call(getpid())?, u64::from(victim.process.pid));
            assert_eq!(stopped_thread.call(Call::new("getppid", libc::SYS_getppid, []))?, u64::from(victim.child.id()));
            stopped_thread.call(Call::new("close", libc::SYS_close, [12345]))
        })
        .unwrap_err();
    assert_eq!(e.errno(), Some(libc::EBADF));
    assert!(e.to_string().contains("`close`"), "{e}");
    assert!(victim.process.is_alive());
}

#[test]
fn another_tracer_is_named() {
    let victim = Victim::start("read");
    let mut command = Victim::command("tracer");
    let tracer = Victim::start_command(command.env("REKINDLE_TEST_TRACEE", victim.process.pid.to_string()));
    let tracer_pid = tracer.process.pid;
    let e = victim.injector().call(getpid()).unwrap_err();
    assert!(matches!(&e, InjectError::Traced { tracer, .. } if *tracer == tracer_pid), "{e:?}");
    assert!(e.to_string().contains(&tracer_pid.to_string()), "{e}");
    tracer.assert_undisturbed();
    assert_eq!(victim.injector().call(getpid()).unwrap(), u64::from(victim.process.pid));
}

#[test]
fn a_seccomp_filter_that_kills_for_the_call_is_suspended_or_the_call_refused() {
    let mut victim = Victim::start("filtered");
    let deadline = in_a_minute();
    let status = format!("/proc/{}/status", victim.process.pid);
    while !std::fs::read_to_string(&status).unwrap().contains("Seccomp:\t1") {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    match victim.injector().call(getpid()) {
        Ok(pid) => assert_eq!(pid, u64::from(victim.process.pid)),
        Err(e) => assert!(matches!(e, InjectError::Filtered { .. }), "{e}"),
    }
    victim.send_byte();
    wait_line(&mut victim.output, "right");
}

#[test]
fn a_process_that_has_ended_is_reported_as_gone() {
    let mut victim = Victim::start("read");
    let injector = victim.injector();
    victim.process.kill().unwrap();
    victim.child.wait().unwrap();
    assert!(matches!(injector.call(getpid()), Err(InjectError::Gone { .. })));
    assert!(matches!(Injector::new(victim.process), Err(InjectError::Gone { .. })));
}
