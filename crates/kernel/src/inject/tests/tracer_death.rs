//! The tracing process is killed, at each step of an injection and at random moments. The victim is not disturbed.

use super::*;
use std::time::Duration;

const TRACEE: &str = "REKINDLE_TEST_TRACEE";
const DEATH_POINT: &str = "REKINDLE_TEST_DEATH_POINT";
/// Number of tracers of a victim that are killed at random moments.
const DEATHS: u64 = 300;

#[test]
fn a_thread_continues_undisturbed_wherever_its_tracer_dies() {
    for kind in ["state-read", "state-epoll", "state-poll", "state-spin"] {
        for point in ["stopped", "set", "entry", "inside", "exit", "restored"] {
            eprintln!("{kind}, {point}");
            let victim = Victim::start(kind);
            wait_until_at_work(&victim, kind);
            let mut tracer = Victim::command("dying-tracer");
            tracer.env(TRACEE, victim.process.pid.to_string()).env(DEATH_POINT, point);
            // The test harness of the tracer exits with the number of the signal that has ended its child.
            assert_eq!(tracer.status().unwrap().code(), Some(libc::SIGKILL), "the tracer did not come to its death");
            end_work(victim, kind);
        }
    }
}

#[test]
fn hundreds_of_tracers_that_die_at_random_moments_do_not_disturb_a_process() {
    for kind in ["state-read", "state-spin"] {
        let victim = Victim::start(kind);
        wait_until_at_work(&victim, kind);
        let mut command = Victim::command("dying-tracers");
        let tracers = Victim::start_command(command.env(TRACEE, victim.process.pid.to_string()));
        tracers.assert_undisturbed();
        end_work(victim, kind);
    }
}

#[test]
fn a_thread_whose_stack_is_full_is_not_chosen() {
    let mut victim = Victim::start("full-stack");
    wait_until_in_call(victim.process.pid, libc::SYS_read);
    let injector = victim.injector();
    let mut tracee = Tracee::seize(victim.process.pid as i32, libc::PTRACE_O_TRACESYSGOOD).unwrap();
    assert!(tracee.halt(in_a_minute()).unwrap());
    assert!(!tracee.prepare_return(victim.process, injector.gadgets.restorer).unwrap());
    drop(tracee);
    assert!(injector.stop(victim.process.pid as i32).unwrap().is_none());
    victim.send_byte();
    victim.assert_undisturbed();
}

/// Waits until a victim of `state.rs` has filled its registers.
fn wait_until_at_work(victim: &Victim, kind: &str) {
    let deadline = in_a_minute();
    match kind {
        "state-read" => wait_until_in_call(victim.process.pid, libc::SYS_read),
        "state-epoll" => wait_until_in_call(victim.process.pid, libc::SYS_epoll_wait),
        "state-poll" => wait_until_in_call(victim.process.pid, libc::SYS_poll),
        _ => {
            let mut turns = [0; 4];
            while turns == [0; 4] {
                assert!(Instant::now() < deadline, "it does not compute");
                crate::memory::read(victim.process, spin_address(victim) + 4, &mut turns).unwrap();
            }
        }
    }
}

fn spin_address(victim: &Victim) -> u64 {
    victim.started_with.parse().unwrap()
}

fn wait_until_in_call(pid: u32, number: i64) {
    let deadline = in_a_minute();
    while !std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap().starts_with(&format!("{number} ")) {
        assert!(Instant::now() < deadline, "it does not enter call {number}");
        std::thread::yield_now();
    }
}

fn end_work(mut victim: Victim, kind: &str) {
    match kind {
        "state-spin" => crate::memory::write(victim.process, spin_address(&victim), &1u32.to_ne_bytes()).unwrap(),
        _ => victim.send_byte(),
    }
    victim.assert_undisturbed();
}

fn tracee() -> Process {
    Process::of(std::env::var(TRACEE).unwrap().parse().unwrap()).unwrap()
}

/// The program of a tracer that injects a call and kills itself at the point that the environment names.
pub(super) fn dying_tracer() {
    let victim = tracee();
    let injector = Injector::new(victim).unwrap();
    let tid = victim.pid as i32;
    let point = std::env::var(DEATH_POINT).unwrap();
    let die_at = |at: &str| {
        if point == at {
            Process::current().unwrap().kill().unwrap();
        }
    };
    let mut tracee = Tracee::seize(tid, libc::PTRACE_O_TRACESYSGOOD).unwrap();
    assert!(tracee.halt(in_a_minute()).unwrap());
    die_at("stopped");
    assert!(tracee.prepare_return(victim, injector.gadgets.restorer).unwrap());
    let call = match point.as_str() {
        // A call that takes as long as the death of the tracer, which calls of ours never do.
        "inside" => Call::new("poll", libc::SYS_poll, [0, 0, 50]),
        _ => getpid(),
    };
    tracee.set_call(injector.gadgets.call_and_return, call).unwrap();
    die_at("set");
    assert_eq!(tracee.enter_call(injector.gadgets.call_and_return, call, in_a_minute()).unwrap(), EntryStop::AtCall);
    die_at("entry");
    if point == "restored" {
        assert_eq!(tracee.finish_call(in_a_minute()).unwrap(), Some(victim.pid.into()));
        die_at("restored");
    }
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the request has no address of ours.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SYSCALL, tid, none, none) }, 0);
    if point == "inside" {
        let deadline = in_a_minute();
        while process_state(victim.pid) != Some('S') {
            assert!(Instant::now() < deadline, "it does not wait in the call");
        }
        die_at("inside");
    }
    let mut status = 0;
    // SAFETY: the kernel writes an int to `status`.
    assert_eq!(unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) }, tid);
    assert_eq!(libc::WSTOPSIG(status), libc::SIGTRAP | 0x80);
    die_at("exit");
}

/// The program of a process that starts tracers, each of which injects calls until it is killed.
pub(super) fn dying_tracers() {
    let injector = Injector::new(tracee()).unwrap();
    println!("started");
    let mut random = 1u64;
    for _ in 0..DEATHS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // SAFETY: this process has one thread, so the child may do everything.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                if let Err(e) = injector.call(getpid()) {
                    eprintln!("{e}");
                    // SAFETY: ends the child only.
                    unsafe { libc::_exit(1) };
                }
            }
        }
        // The moment of the death is random; nothing is awaited.
        std::thread::sleep(Duration::from_micros(300 + (random >> 33) % 3000));
        let mut status = 0;
        // SAFETY: a child that has not been waited for; the kernel writes an int to `status`.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert!(libc::WIFSIGNALED(status), "a tracer failed: {status:#x}");
    }
    println!("right");
}
