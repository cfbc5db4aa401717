//! Calls that are cancelled half-way: the process continues with its own registers, or has ended.

use super::*;

#[test]
fn a_thread_that_is_dropped_at_the_beginning_of_a_call_does_not_do_it_and_continues() {
    for kind in ["read", "epoll-for-ever"] {
        let mut victim = Victim::start(kind);
        let instruction = victim.injector().gadgets.call_and_return;
        let mut tracee = stop_first_thread(&victim);
        // If this call were made, it would end the process.
        let stop = tracee.enter_call(instruction, exit_group(), in_a_minute()).unwrap();
        assert_eq!(stop, EntryStop::AtCall);
        drop(tracee);
        victim.send_byte();
        victim.assert_undisturbed();
    }
}

#[test]
fn a_call_that_does_not_return_is_interrupted_at_its_deadline() {
    for kind in ["read", "epoll-for-ever"] {
        let mut victim = Victim::start(kind);
        let instruction = victim.injector().gadgets.call_and_return;
        let mut tracee = stop_first_thread(&victim);
        assert_eq!(
            tracee.enter_call(instruction, Call::new("pause", libc::SYS_pause, []), in_a_minute()).unwrap(),
            EntryStop::AtCall
        );
        let reason = tracee.finish_call(Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(matches!(reason, Cancelled::Late), "{reason:?}");
        drop(tracee);
        victim.send_byte();
        victim.assert_undisturbed();
    }
}

#[test]
fn a_thread_that_does_not_come_to_its_call_in_time_has_its_registers_back() {
    // The deadline expires immediately. Whether the thread has reached its call by then is a matter of chance; both
    // cases must be undone.
    for kind in ["read", "epoll-for-ever", "compute"] {
        let mut victim = Victim::start(kind);
        let injector = victim.injector();
        let instruction = injector.gadgets.call_and_return;
        let disturb = || {
            for _ in 0..200 {
                let mut tracee = Tracee::seize(victim.process.pid as i32, libc::PTRACE_O_TRACESYSGOOD)?;
                if !tracee.halt(in_a_minute())? || !tracee.prepare_return(victim.process, injector.gadgets.restorer)? {
                    break;
                }
                let _ = tracee.enter_call(instruction, exit_group(), Instant::now());
            }
            io::Result::Ok(())
        };
        // A victim that has ended is released when its tracing thread ends.
        let result = std::thread::scope(|scope| scope.spawn(disturb).join()).unwrap();
        assert!(result.is_ok() || kind == "compute", "{kind}: {result:?}");
        if kind != "compute" {
            victim.send_byte();
        }
        victim.assert_undisturbed();
    }
}

#[test]
fn a_process_that_ends_while_it_is_called_into_is_gone() {
    // Kills the victim at each point in turn.
    for kill_at in ["entry", "exit", "end"] {
        let victim = Victim::start("read");
        let injector = victim.injector();
        let kill = || victim.process.kill().unwrap();
        let e = injector
            .run(|stopped_thread| {
                if kill_at == "entry" {
                    kill();
                }
                stopped_thread
                    .tracee
                    .enter_call(injector.gadgets.call_and_return, getpid(), in_a_minute())
                    .map(drop)
                    .or_else(expect_gone)?;
                if kill_at == "exit" {
                    kill();
                }
                stopped_thread.tracee.finish_call(in_a_minute()).map(drop).or_else(expect_gone)?;
                if kill_at == "end" {
                    kill();
                }
                stopped_thread.call(getpid())
            })
            .unwrap_err();
        assert!(matches!(e, InjectError::Gone { .. }), "{kill_at}: {e}");
    }
    let mut victim = Victim::start("ends");
    let injector = victim.injector();
    victim.send_byte();
    let deadline = in_a_minute();
    let e = loop {
        match injector.call(getpid()) {
            Ok(_) => assert!(Instant::now() < deadline, "it does not end"),
            Err(e) => break e,
        }
    };
    assert!(matches!(e, InjectError::Gone { .. } | InjectError::Stuck { .. }), "{e}");
}

fn expect_gone(reason: Cancelled) -> Result<(), InjectError> {
    match reason {
        Cancelled::Failed(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(InjectError::Gone { pid: 0 }),
        other => panic!("{other:?}"),
    }
}
