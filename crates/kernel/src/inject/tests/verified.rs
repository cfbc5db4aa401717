//! A call that something else denies, traps or changes is never reported as done.

use super::*;

#[test]
fn a_call_that_a_filter_denies_gives_the_error_and_the_process_continues() {
    let mut victim = Victim::start("denied");
    let instruction = victim.injector().gadgets.call_and_return;
    let mut tracee = stop_first_thread(&victim);
    assert_eq!(tracee.enter_call(instruction, getpid(), in_a_minute()).unwrap(), EntryStop::AtCall);
    assert_eq!(tracee.finish_call(in_a_minute()).unwrap(), Some(-i64::from(libc::EPERM)));
    assert!(!tracee.has_pending(victim.process, libc::SIGSYS));
    drop(tracee);
    victim.send_byte();
    victim.assert_undisturbed();
}

#[test]
fn a_call_that_a_filter_traps_is_known_by_its_signal_and_not_taken_for_a_result() {
    let mut victim = Victim::start("trapped");
    let instruction = victim.injector().gadgets.call_and_return;
    let tracee = stop_first_thread(&victim);
    let call = Call::new("getpid", libc::SYS_getpid, []);
    // `is_filtered` is false, so that the call is made although it is not a harmless one.
    let mut stopped_thread = StoppedThread { injector: victim.injector(), tracee, is_filtered: false };
    assert_eq!(stopped_thread.tracee.enter_call(instruction, call, in_a_minute()).unwrap(), EntryStop::AtCall);
    assert_eq!(
        stopped_thread.tracee.finish_call(in_a_minute()).unwrap(),
        Some(libc::SYS_getpid),
        "the number is where the result would be"
    );
    assert!(stopped_thread.tracee.has_pending(victim.process, libc::SIGSYS));
    stopped_thread.is_filtered = true;
    assert!(matches!(stopped_thread.call(call), Err(InjectError::Filtered { .. })));
    drop(stopped_thread);
    // `close` is among the harmless calls, so it is made in spite of the filter, which traps it.
    let mut stopped_thread =
        StoppedThread { injector: victim.injector(), tracee: stop_first_thread(&victim), is_filtered: true };
    let closed = stopped_thread.call(Call::new("close", libc::SYS_close, [12345]));
    assert!(matches!(closed, Err(InjectError::Filtered { .. })), "a call that was not made returned {closed:?}");
    drop(stopped_thread);
    victim.send_byte();
    // The handler returns and the interrupted `read` restarts, because `signal` sets `SA_RESTART`.
    victim.assert_undisturbed();
}

#[test]
fn a_call_that_is_changed_on_its_way_is_neither_done_nor_taken_for_ours() {
    let mut victim = Victim::start("read");
    // At `mov $NUMBER, %eax; syscall` the kernel receives another call than the one that was set up.
    let vdso = crate::maps::of(victim.process).unwrap().into_iter().find(|map| map.name == "[vdso]").unwrap().range;
    let mut text = vec![0; (vdso.end - vdso.start) as usize];
    crate::memory::read(victim.process, vdso.start, &mut text).unwrap();
    let at = text.windows(7).position(|part| part[0] == 0xb8 && part[3..] == [0, 0, 0x0f, 0x05]).expect("its fallback");
    let instruction = vdso.start + at as u64;
    let mut tracee = stop_first_thread(&victim);
    let reason = tracee.enter_call(instruction, getpid(), in_a_minute()).unwrap_err();
    assert!(matches!(reason, Cancelled::Elsewhere), "{reason:?}");
    drop(tracee);
    assert_ne!(process_state(victim.process.pid), Some('t'));
    victim.send_byte();
    victim.assert_undisturbed();
}
