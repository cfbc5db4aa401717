//! A process into which calls are injected notices nothing.

use super::program::SIGNALS;
use super::*;

#[test]
fn waits_with_a_time_out_end_by_it_and_never_by_a_call_of_ours() {
    let kinds = ["nanosleep", "poll", "ppoll", "select", "epoll", "epoll-mask", "futex", "sigtimedwait", "receive"];
    for kind in kinds {
        let mut victim = Victim::start(kind);
        let count = victim.disturb_gently();
        assert!(count > 0, "{kind}");
        eprintln!("{kind}: {count} calls");
        victim.assert_undisturbed();
    }
}

#[test]
fn a_thousand_calls_do_not_wake_a_wait_without_time_out() {
    for kind in ["epoll-for-ever", "read"] {
        let mut victim = Victim::start(kind);
        let injector = victim.injector();
        for _ in 0..1000 {
            assert_eq!(injector.call(getpid()).unwrap(), u64::from(victim.process.pid));
        }
        victim.send_byte();
        victim.assert_undisturbed();
    }
}

#[test]
fn a_process_that_computes_or_whose_threads_come_and_go_is_not_disturbed() {
    for kind in ["compute", "threads"] {
        let mut victim = Victim::start(kind);
        assert!(victim.disturb_until_the_end() > 10, "{kind}");
        victim.assert_undisturbed();
    }
}

#[test]
fn every_signal_that_comes_meanwhile_is_delivered_once_with_its_value() {
    let mut victim = Victim::start("signals");
    let pid = victim.process.pid as i32;
    let sender = std::thread::spawn(move || {
        for n in 0..SIGNALS {
            let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(n as usize) };
            // SAFETY: a signal to a child that has not been waited for.
            while unsafe { libc::sigqueue(pid, libc::SIGRTMIN() + 3, value) } != 0 {
                std::thread::yield_now();
            }
            // Spreads the signals over many waits of the victim.
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    let count = victim.disturb_until_the_end();
    assert!(count > 0);
    eprintln!("{count} calls while {SIGNALS} signals came");
    sender.join().unwrap();
    victim.assert_undisturbed();
}

#[test]
fn a_stopped_process_makes_the_call_and_stays_stopped() {
    let mut victim = Victim::start("read");
    let pid = victim.process.pid;
    // SAFETY: a signal to a child that has not been waited for.
    let send = |signal| assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    let wait_until_stopped = || {
        let deadline = in_a_minute();
        while process_state(pid) != Some('T') {
            assert!(Instant::now() < deadline, "it is {:?}", process_state(pid));
            std::thread::yield_now();
        }
    };
    send(libc::SIGSTOP);
    wait_until_stopped();
    let injector = victim.injector();
    for _ in 0..100 {
        assert_eq!(injector.call(getpid()).unwrap(), u64::from(pid));
        assert_eq!(process_state(pid), Some('T'));
    }
    send(libc::SIGCONT);
    victim.send_byte();
    victim.assert_undisturbed();
}
