//! Injection into processes in many states. Each victim is this test binary, run again with [`victim`] as its only
//! test.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const KIND: &str = "REKINDLE_TEST_VICTIM";
const DEADLINE: Duration = Duration::from_secs(60);

/// A process that does one kind of work, and prints `right` at its end if nothing disturbed it.
struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    process: Process,
}

impl Victim {
    fn start(kind: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "inject::tests::victim", "--ignored", "--nocapture", "--test-threads=1"])
            .env(KIND, kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let process = Process::of(wait_line(&mut output, "pid ").parse().unwrap()).unwrap();
        wait_line(&mut output, "started");
        Self { input: child.stdin.take(), child, output, process }
    }

    fn injector(&self) -> Injector {
        Injector::new(self.process).unwrap()
    }

    /// Injects calls until the victim ends, at least one. Returns their number.
    fn disturb_until_the_end(&mut self) -> u32 {
        let injector = self.injector();
        let mut count = 0;
        while fs_state(self.process.pid).is_some_and(|state| state != 'Z') {
            match injector.call(getpid()) {
                Ok(pid) => assert_eq!(pid, u64::from(self.process.pid)),
                Err(InjectError::Gone { .. } | InjectError::Stuck { .. }) if !self.process.is_alive() => break,
                Err(e) => panic!("after {count} calls: {e} ({:?})", std::error::Error::source(&e)),
            }
            count += 1;
        }
        count
    }

    /// Asserts that the victim has ended undisturbed.
    fn right(mut self) {
        drop(self.input.take());
        wait_line(&mut self.output, "right");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a line that contains `wanted`, and returns the text after it.
fn wait_line(output: &mut impl BufRead, wanted: &str) -> String {
    let mut seen = String::new();
    loop {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "{wanted:?} never came, but: {seen}");
        // The test harness may have written to the same line before.
        if let Some((_, rest)) = line.split_once(wanted) {
            return rest.trim_end().into();
        }
        seen += &line;
    }
}

fn fs_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn getpid() -> Call {
    Call::new("getpid", libc::SYS_getpid, [])
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

const WAIT: Duration = Duration::from_millis(30);
const ROUNDS_OF_WAITING: u32 = 15;

/// Calls `wait` repeatedly. It must return an error unless its wait ended by the time-out; no wait may end early.
fn waits(mut wait: impl FnMut() -> Result<(), String>) {
    println!("started");
    for round in 0..ROUNDS_OF_WAITING {
        let started = Instant::now();
        wait().unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert!(started.elapsed() >= WAIT, "round {round} ended after {:?}", started.elapsed());
    }
    println!("right");
}

/// Asserts that a call returned `value`, and `error` if `value` is -1.
fn gave(result: i64, value: i64, error: i32) -> Result<(), String> {
    if result == value && (value >= 0 || errno() == error) { Ok(()) } else { Err(format!("{result}, {}", errno())) }
}

/// The program of the victims, not a test.
#[test]
#[ignore = "run by the other tests"]
fn victim() {
    let Ok(kind) = std::env::var(KIND) else { return };
    // Forks, to have a process with one thread: otherwise the harness's thread would be chosen for the calls.
    // SAFETY: the harness's other thread waits for this one and holds no lock that the child needs.
    match unsafe { libc::fork() } {
        0 => {
            println!("pid {}", std::process::id());
            let done = std::panic::catch_unwind(|| act(&kind));
            // SAFETY: ends the child without running the harness's own end a second time.
            unsafe { libc::_exit(i32::from(done.is_err())) };
        }
        child => {
            let mut status = 0;
            // SAFETY: the kernel writes an int to `status`.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            std::process::exit(status);
        }
    }
}

/// Does the work of one kind of victim. Every call gets descriptors, numbers and buffers that live through it.
#[allow(clippy::undocumented_unsafe_blocks, reason = "they all rest on the same: see above")]
fn act(kind: &str) {
    let milliseconds = WAIT.as_millis() as i32;
    let time = timespec(WAIT);
    match kind {
        "nanosleep" => waits(|| {
            let mut left = time;
            gave(unsafe { libc::nanosleep(&raw const time, &raw mut left) }.into(), 0, 0)
        }),
        "poll" => waits(|| gave(unsafe { libc::poll(std::ptr::null_mut(), 0, milliseconds) }.into(), 0, 0)),
        "ppoll" => waits(|| {
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigfillset(&raw mut mask) };
            gave(unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const time, &raw const mask) }.into(), 0, 0)
        }),
        "select" => waits(|| {
            let mut time = libc::timeval { tv_sec: 0, tv_usec: i64::from(milliseconds) * 1000 };
            let none = std::ptr::null_mut();
            gave(unsafe { libc::select(0, none, none, none, &raw mut time) }.into(), 0, 0)
        }),
        "epoll" | "epoll-mask" => {
            let epoll = unsafe { libc::epoll_create1(0) };
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigfillset(&raw mut mask) };
            let mask = if kind == "epoll" { std::ptr::null() } else { &raw const mask };
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            waits(|| gave(unsafe { libc::epoll_pwait(epoll, &raw mut event, 1, milliseconds, mask) }.into(), 0, 0));
        }
        "futex" => waits(|| {
            let word = 7u32;
            let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
            let got = unsafe { libc::syscall(libc::SYS_futex, &raw const word, operation, 7, &raw const time) };
            gave(got, -1, libc::ETIMEDOUT)
        }),
        "sigtimedwait" => waits(|| {
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigaddset(&raw mut mask, libc::SIGUSR2) };
            let got = unsafe { libc::sigtimedwait(&raw const mask, std::ptr::null_mut(), &raw const time) };
            gave(got.into(), -1, libc::EAGAIN)
        }),
        "receive" => {
            let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
            one.set_read_timeout(Some(WAIT)).unwrap();
            waits(|| {
                let mut byte = 0u8;
                let fd = std::os::fd::AsRawFd::as_raw_fd(&one);
                gave(unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, 0) } as i64, -1, libc::EAGAIN)
            });
        }
        "epoll-for-ever" => {
            let epoll = unsafe { libc::epoll_create1(0) };
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
            unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, 0, &raw mut event) };
            println!("started");
            let got = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, -1) };
            assert_eq!(got, 1, "{}", errno());
            println!("right");
        }
        "read" => {
            println!("started");
            let mut byte = 0u8;
            assert_eq!(unsafe { libc::read(0, (&raw mut byte).cast(), 1) }, 1, "{}", errno());
            println!("right");
        }
        "compute" => compute(),
        "signals" => signals(),
        "threads" => threads(),
        "tracer" => {
            let pid: i32 = std::env::var("REKINDLE_TEST_TRACEE").unwrap().parse().unwrap();
            let _tracee = Tracee::seize(pid, 0).unwrap();
            println!("started");
            wait_for_end_of_input();
            println!("right");
        }
        "filtered" => {
            // A filter (seccomp mode 1: only read, write, exit and sigreturn) that kills for anything else.
            println!("started");
            std::io::stdout().flush().unwrap();
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, 1) }, 0);
            let (mut byte, text) = (0u8, b"right\n");
            unsafe {
                libc::read(0, (&raw mut byte).cast(), 1);
                libc::write(1, text.as_ptr().cast(), text.len());
                libc::syscall(libc::SYS_exit, 0);
            }
        }
        "denied" | "trapped" => {
            deny_getpid(kind == "trapped");
            println!("started");
            let mut byte = 0u8;
            assert_eq!(unsafe { libc::read(0, (&raw mut byte).cast(), 1) }, 1, "{}", errno());
            println!("right");
        }
        "ends" => {
            println!("started");
            let mut byte = 0u8;
            unsafe {
                libc::read(0, (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
        }
        other => panic!("no victim {other}"),
    }
}

/// Installs a filter. Without `trap`, `getpid` fails with EPERM. With `trap`, `getpid` and `close` raise SIGSYS, whose
/// handler does nothing.
fn deny_getpid(trap: bool) {
    extern "C" fn ignore(_: i32) {}
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let denied = if trap { libc::SECCOMP_RET_TRAP } else { libc::SECCOMP_RET_ERRNO | libc::EPERM as u32 };
    let is = |call: libc::c_long| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32);
    let second = if trap { libc::SYS_close } else { libc::SYS_getpid };
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter { jt: 1, ..is(libc::SYS_getpid) },
        libc::sock_filter { jf: 1, ..is(second) },
        statement(libc::BPF_RET | libc::BPF_K, denied),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter lives through the calls, and the handler does nothing.
    unsafe {
        libc::signal(libc::SIGSYS, ignore as *const () as usize);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn wait_for_end_of_input() {
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut rest).unwrap();
}

/// Computes numbers and fractions whose sum is known and which stay in registers most of the time.
fn compute() {
    println!("started");
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(600) {
        let (mut x, mut sum, mut f) = (1u64, 0u64, 1.0f64);
        for _ in 0..200_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            sum = sum.wrapping_add(x);
            f = f.mul_add(1.000_000_1, 0.5);
        }
        assert_eq!((x, sum, f.to_bits()), expected(), "the registers changed");
    }
    println!("right");
}

fn expected() -> (u64, u64, u64) {
    static ONCE: std::sync::OnceLock<(u64, u64, u64)> = std::sync::OnceLock::new();
    *ONCE.get_or_init(|| {
        let (mut x, mut sum, mut f) = (1u64, 0u64, 1.0f64);
        for _ in 0..200_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            sum = sum.wrapping_add(x);
            f = f.mul_add(1.000_000_1, 0.5);
        }
        (x, sum, f.to_bits())
    })
}

static HANDLED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
static SUM: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
const SIGNALS: u64 = 1500;

extern "C" fn handler(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    use std::sync::atomic::Ordering::Relaxed;
    // SAFETY: the kernel gives a whole siginfo to a handler with SA_SIGINFO.
    let value = unsafe { (*info).si_value().sival_ptr } as u64;
    SUM.fetch_add(value, Relaxed);
    HANDLED.fetch_add(1, Relaxed);
}

/// Receives numbered, queued signals. Each must be handled once, and end a wait that is not to be restarted.
fn signals() {
    use std::sync::atomic::Ordering::Relaxed;
    // SAFETY: the handler above does only what is allowed in one.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGRTMIN() + 3, &raw const action, std::ptr::null_mut());
    }
    println!("started");
    let mut interrupted = 0;
    while HANDLED.load(Relaxed) < SIGNALS {
        // SAFETY: no descriptors are given.
        let got = unsafe { libc::poll(std::ptr::null_mut(), 0, 20) };
        interrupted += u32::from(got < 0 && errno() == libc::EINTR);
    }
    assert_eq!(HANDLED.load(Relaxed), SIGNALS);
    assert_eq!(SUM.load(Relaxed), SIGNALS * (SIGNALS - 1) / 2, "each once, with its own number");
    assert!(interrupted > 0, "a handler ends a wait");
    println!("right");
}

/// Starts and joins threads repeatedly.
fn threads() {
    println!("started");
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(600) {
        let some: Vec<_> = (0..4).map(|n| std::thread::spawn(move || n * 2)).collect();
        for (n, thread) in some.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), n * 2);
        }
    }
    println!("right");
}

#[test]
fn waits_with_a_time_out_end_by_it_and_never_by_a_call_of_ours() {
    let kinds = ["nanosleep", "poll", "ppoll", "select", "epoll", "epoll-mask", "futex", "sigtimedwait", "receive"];
    for kind in kinds {
        let mut victim = Victim::start(kind);
        let count = victim.disturb_gently();
        assert!(count > 0, "{kind}");
        eprintln!("{kind}: {count} calls");
        victim.right();
    }
}

impl Victim {
    /// Injects like [`Victim::disturb_until_the_end`], but pauses between calls for longer than a time-out, since the
    /// time-outs of some calls start again.
    fn disturb_gently(&mut self) -> u32 {
        let injector = self.injector();
        let mut count = 0;
        while self.process.is_alive() {
            match injector.call(getpid()) {
                Ok(pid) => assert_eq!(pid, u64::from(self.process.pid)),
                Err(_) if !self.process.is_alive() => break,
                Err(e) => panic!("after {count} calls: {e} ({:?})", std::error::Error::source(&e)),
            }
            count += 1;
            std::thread::sleep(Duration::from_millis(7) + if count % 3 == 0 { WAIT } else { Duration::ZERO });
        }
        count
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
        victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        victim.right();
    }
}

#[test]
fn a_process_that_computes_or_whose_threads_come_and_go_is_not_disturbed() {
    for kind in ["compute", "threads"] {
        let mut victim = Victim::start(kind);
        assert!(victim.disturb_until_the_end() > 10, "{kind}");
        victim.right();
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
    victim.right();
}

#[test]
fn a_stopped_process_makes_the_call_and_stays_stopped() {
    let mut victim = Victim::start("read");
    let pid = victim.process.pid;
    // SAFETY: a signal to a child that has not been waited for.
    let signal = |signal| assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
    let stopped = || {
        let end = Instant::now() + DEADLINE;
        while fs_state(pid) != Some('T') {
            assert!(Instant::now() < end, "it is {:?}", fs_state(pid));
            std::thread::yield_now();
        }
    };
    signal(libc::SIGSTOP);
    stopped();
    let injector = victim.injector();
    for _ in 0..100 {
        assert_eq!(injector.call(getpid()).unwrap(), u64::from(pid));
        stopped();
    }
    signal(libc::SIGCONT);
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    victim.right();
}

#[test]
fn several_calls_in_one_stop_and_the_error_of_one() {
    let victim = Victim::start("read");
    let injector = victim.injector();
    let e = injector
        .run(|session| {
            assert_eq!(session.call(getpid())?, u64::from(victim.process.pid));
            assert_eq!(session.call(Call::new("getppid", libc::SYS_getppid, []))?, u64::from(victim.child.id()));
            session.call(Call::new("close", libc::SYS_close, [12345]))
        })
        .unwrap_err();
    assert_eq!(e.errno(), Some(libc::EBADF));
    assert!(e.to_string().contains("`close`"), "{e}");
    assert!(victim.process.is_alive());
}

#[test]
fn another_tracer_is_named() {
    let victim = Victim::start("read");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "inject::tests::victim", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(KIND, "tracer").env("REKINDLE_TEST_TRACEE", victim.process.pid.to_string());
    let mut tracer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(tracer.stdout.take().unwrap());
    let pid: u32 = wait_line(&mut output, "pid ").parse().unwrap();
    wait_line(&mut output, "started");
    let e = victim.injector().call(getpid()).unwrap_err();
    assert!(matches!(&e, InjectError::Traced { tracer: by, .. } if *by == pid), "{e:?}");
    assert!(e.to_string().contains(&pid.to_string()), "{e}");
    drop(tracer.stdin.take());
    wait_line(&mut output, "right");
    assert!(tracer.wait().unwrap().success());
    assert_eq!(victim.injector().call(getpid()).unwrap(), u64::from(victim.process.pid));
}

#[test]
fn a_seccomp_filter_that_kills_for_the_call_is_suspended_or_the_call_refused() {
    let mut victim = Victim::start("filtered");
    let end = Instant::now() + DEADLINE;
    let status = format!("/proc/{}/status", victim.process.pid);
    while !std::fs::read_to_string(&status).unwrap().contains("Seccomp:\t1") {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    match victim.injector().call(getpid()) {
        Ok(pid) => assert_eq!(pid, u64::from(victim.process.pid)),
        Err(e) => assert!(matches!(e, InjectError::Filtered { .. }), "{e}"),
    }
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
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

/// Stops the victim's first thread without suspending its filters.
fn stopped(victim: &Victim) -> Tracee {
    let mut tracee = Tracee::seize(victim.process.pid as i32, libc::PTRACE_O_TRACESYSGOOD).unwrap();
    assert!(tracee.halt(Instant::now() + DEADLINE).unwrap());
    tracee
}

fn soon() -> Instant {
    Instant::now() + DEADLINE
}

#[test]
fn a_call_that_a_filter_denies_gives_the_error_and_the_process_continues() {
    let mut victim = Victim::start("denied");
    let instruction = victim.injector().instruction;
    let mut tracee = stopped(&victim);
    assert_eq!(tracee.enter(instruction, libc::SYS_getpid, [0; 6], soon()).unwrap(), Stop::Call);
    assert_eq!(tracee.leave(soon()).unwrap(), Some(-i64::from(libc::EPERM)));
    assert!(!tracee.has_pending(victim.process, libc::SIGSYS));
    drop(tracee);
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    victim.right();
}

#[test]
fn a_call_that_a_filter_traps_is_known_by_its_signal_and_not_taken_for_a_result() {
    let mut victim = Victim::start("trapped");
    let instruction = victim.injector().instruction;
    let tracee = stopped(&victim);
    let call = Call::new("getpid", libc::SYS_getpid, []);
    // `filtered` is false, so that the call is made although it is not a harmless one.
    let mut session = StoppedThread { injector: victim.injector(), tracee, filtered: false };
    assert_eq!(session.tracee.enter(instruction, call.number, call.arguments, soon()).unwrap(), Stop::Call);
    assert_eq!(
        session.tracee.leave(soon()).unwrap(),
        Some(libc::SYS_getpid),
        "the number is where the result would be"
    );
    assert!(session.tracee.has_pending(victim.process, libc::SIGSYS));
    session.filtered = true;
    assert!(matches!(session.call(call), Err(InjectError::Filtered { .. })));
    drop(session);
    // `close` is among the harmless calls, so it is made in spite of the filter, which traps it.
    let mut session = StoppedThread { injector: victim.injector(), tracee: stopped(&victim), filtered: true };
    let closed = session.call(Call::new("close", libc::SYS_close, [12345]));
    assert!(matches!(closed, Err(InjectError::Filtered { .. })), "a call that was not made returned {closed:?}");
    drop(session);
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    // The handler returns and the interrupted `read` restarts, because `signal` sets `SA_RESTART`.
    victim.right();
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
    let mut tracee = stopped(&victim);
    let doubt = tracee.enter(instruction, libc::SYS_getpid, [0; 6], soon()).unwrap_err();
    assert!(matches!(doubt, Doubt::Elsewhere), "{doubt:?}");
    drop(tracee);
    assert_ne!(fs_state(victim.process.pid), Some('t'));
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    victim.right();
}

#[test]
fn a_thread_that_is_dropped_at_the_beginning_of_a_call_does_not_do_it_and_continues() {
    for kind in ["read", "epoll-for-ever"] {
        let mut victim = Victim::start(kind);
        let instruction = victim.injector().instruction;
        let mut tracee = stopped(&victim);
        // If this call were made, it would end the process.
        let stop = tracee.enter(instruction, libc::SYS_exit_group, [7, 0, 0, 0, 0, 0], soon()).unwrap();
        assert_eq!(stop, Stop::Call);
        drop(tracee);
        victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        victim.right();
    }
}

#[test]
fn a_call_that_does_not_return_is_interrupted_at_its_deadline() {
    for kind in ["read", "epoll-for-ever"] {
        let mut victim = Victim::start(kind);
        let instruction = victim.injector().instruction;
        let mut tracee = stopped(&victim);
        assert_eq!(tracee.enter(instruction, libc::SYS_pause, [0; 6], soon()).unwrap(), Stop::Call);
        let doubt = tracee.leave(Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(matches!(doubt, Doubt::Late), "{doubt:?}");
        drop(tracee);
        victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        victim.right();
    }
}

#[test]
fn a_thread_that_does_not_come_to_its_call_in_time_has_its_registers_back() {
    // The deadline expires immediately. Whether the thread has reached its call by then is a matter of chance; both
    // cases must be undone.
    for kind in ["read", "epoll-for-ever", "compute"] {
        let mut victim = Victim::start(kind);
        let instruction = victim.injector().instruction;
        for _ in 0..200 {
            if !victim.process.is_alive() {
                break;
            }
            let Ok(mut tracee) = Tracee::seize(victim.process.pid as i32, libc::PTRACE_O_TRACESYSGOOD) else { break };
            if !tracee.halt(soon()).unwrap_or(false) {
                break;
            }
            let _ = tracee.enter(instruction, libc::SYS_exit_group, [7, 0, 0, 0, 0, 0], Instant::now());
        }
        if kind != "compute" {
            victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        }
        victim.right();
    }
}

#[test]
fn a_process_that_ends_while_it_is_called_into_is_gone() {
    // Kills the victim at each point in turn.
    for place in 0..3 {
        let victim = Victim::start("read");
        let injector = victim.injector();
        let kill = || victim.process.kill().unwrap();
        let e = injector
            .run(|session| {
                if place == 0 {
                    kill();
                }
                session.tracee.enter(injector.instruction, libc::SYS_getpid, [0; 6], soon()).map(drop).or_else(gone)?;
                if place == 1 {
                    kill();
                }
                session.tracee.leave(soon()).map(drop).or_else(gone)?;
                if place == 2 {
                    kill();
                }
                session.call(getpid())
            })
            .unwrap_err();
        assert!(matches!(e, InjectError::Gone { .. }), "{place}: {e}");
    }
    let mut victim = Victim::start("ends");
    let injector = victim.injector();
    victim.input.as_mut().unwrap().write_all(b"x").unwrap();
    let end = Instant::now() + DEADLINE;
    let e = loop {
        match injector.call(getpid()) {
            Ok(_) => assert!(Instant::now() < end, "it does not end"),
            Err(e) => break e,
        }
    };
    assert!(matches!(e, InjectError::Gone { .. } | InjectError::Stuck { .. }), "{e}");
}

fn gone(doubt: Doubt) -> Result<(), InjectError> {
    match doubt {
        Doubt::Failed(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(InjectError::Gone { pid: 0 }),
        other => panic!("{other:?}"),
    }
}
