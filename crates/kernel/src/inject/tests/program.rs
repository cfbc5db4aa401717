//! The programs of the victims: each waits, computes or receives signals, and checks that nothing disturbs it.

use super::*;

pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// Time-out of each wait of a victim.
pub(super) const WAIT: Duration = Duration::from_millis(30);
/// Number of waits of a victim.
const WAITS: u32 = 15;

/// Calls `wait` [`WAITS`] times. It must return an error unless its wait ended by the time-out; no wait may end early.
fn wait_repeatedly(mut wait: impl FnMut() -> Result<(), String>) {
    println!("started");
    for round in 0..WAITS {
        let started = Instant::now();
        wait().unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert!(started.elapsed() >= WAIT, "round {round} ended after {:?}", started.elapsed());
    }
    println!("right");
}

/// Checks that a call returned `value`, and `error` if `value` is -1.
fn check_result(result: i64, value: i64, error: i32) -> Result<(), String> {
    if result == value && (value >= 0 || errno() == error) { Ok(()) } else { Err(format!("{result}, {}", errno())) }
}

/// The program of the victims, not a test.
#[test]
#[ignore = "run by the other tests"]
fn victim() {
    let Ok(kind) = std::env::var(VICTIM_KIND) else { return };
    // Forks, to have a process with one thread: otherwise the harness's thread would be chosen for the calls.
    // SAFETY: the harness's other thread waits for this one and holds no lock that the child needs.
    match unsafe { libc::fork() } {
        0 => {
            println!("pid {}", std::process::id());
            let result = std::panic::catch_unwind(|| run_program(&kind));
            // SAFETY: ends the child without running the harness's own end a second time.
            unsafe { libc::_exit(i32::from(result.is_err())) };
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
fn run_program(kind: &str) {
    let milliseconds = WAIT.as_millis() as i32;
    let time = timespec(WAIT);
    match kind {
        "nanosleep" => wait_repeatedly(|| {
            let mut remaining = time;
            check_result(unsafe { libc::nanosleep(&raw const time, &raw mut remaining) }.into(), 0, 0)
        }),
        "poll" => {
            wait_repeatedly(|| check_result(unsafe { libc::poll(std::ptr::null_mut(), 0, milliseconds) }.into(), 0, 0))
        }
        "ppoll" => wait_repeatedly(|| {
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigfillset(&raw mut mask) };
            check_result(unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const time, &raw const mask) }.into(), 0, 0)
        }),
        "select" => wait_repeatedly(|| {
            let mut time = libc::timeval { tv_sec: 0, tv_usec: i64::from(milliseconds) * 1000 };
            let none = std::ptr::null_mut();
            check_result(unsafe { libc::select(0, none, none, none, &raw mut time) }.into(), 0, 0)
        }),
        "epoll" | "epoll-mask" => {
            let epoll = unsafe { libc::epoll_create1(0) };
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigfillset(&raw mut mask) };
            let mask = if kind == "epoll" { std::ptr::null() } else { &raw const mask };
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            wait_repeatedly(|| {
                check_result(unsafe { libc::epoll_pwait(epoll, &raw mut event, 1, milliseconds, mask) }.into(), 0, 0)
            });
        }
        "futex" => wait_repeatedly(|| {
            let word = 7u32;
            let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
            let result = unsafe { libc::syscall(libc::SYS_futex, &raw const word, operation, 7, &raw const time) };
            check_result(result, -1, libc::ETIMEDOUT)
        }),
        "sigtimedwait" => wait_repeatedly(|| {
            let mut mask = unsafe { std::mem::zeroed::<libc::sigset_t>() };
            unsafe { libc::sigaddset(&raw mut mask, libc::SIGUSR2) };
            let result = unsafe { libc::sigtimedwait(&raw const mask, std::ptr::null_mut(), &raw const time) };
            check_result(result.into(), -1, libc::EAGAIN)
        }),
        "receive" => {
            let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
            socket.set_read_timeout(Some(WAIT)).unwrap();
            wait_repeatedly(|| {
                let mut byte = 0u8;
                let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
                check_result(unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, 0) } as i64, -1, libc::EAGAIN)
            });
        }
        "epoll-for-ever" => {
            let epoll = unsafe { libc::epoll_create1(0) };
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
            unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, 0, &raw mut event) };
            println!("started");
            let events = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, -1) };
            assert_eq!(events, 1, "{}", errno());
            println!("right");
        }
        "read" => read_byte(),
        "full-stack" => state::read_byte_with_full_stack(),
        kind if kind.starts_with("state-") => state::hold_state(kind),
        "dying-tracer" => tracer_death::dying_tracer(),
        "dying-tracers" => tracer_death::dying_tracers(),
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
            read_byte();
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

/// Reads one byte of standard input.
fn read_byte() {
    println!("started");
    let mut byte = 0u8;
    // SAFETY: the kernel writes at most one byte, to `byte`.
    assert_eq!(unsafe { libc::read(0, (&raw mut byte).cast(), 1) }, 1, "{}", errno());
    println!("right");
}

/// Installs a filter. Without `trap`, `getpid` fails with EPERM. With `trap`, `getpid` and `close` raise SIGSYS, whose
/// handler does nothing.
fn deny_getpid(trap: bool) {
    extern "C" fn ignore(_: i32) {}
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let denied = if trap { libc::SECCOMP_RET_TRAP } else { libc::SECCOMP_RET_ERRNO | libc::EPERM as u32 };
    let jump_if = |call: libc::c_long| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32);
    let second_call = if trap { libc::SYS_close } else { libc::SYS_getpid };
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter { jt: 1, ..jump_if(libc::SYS_getpid) },
        libc::sock_filter { jf: 1, ..jump_if(second_call) },
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
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

/// Computes numbers and fractions whose sum is known and which stay in registers most of the time.
fn compute() {
    // Before the first injection.
    let expected = sums();
    println!("started");
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(600) {
        assert_eq!(sums(), expected, "the registers changed");
    }
    println!("right");
}

/// Returns the last pseudo-random number, the sum of all, and the bits of a fraction that grows with each.
fn sums() -> (u64, u64, u64) {
    let (mut random, mut sum, mut fraction) = (1u64, 0u64, 1.0f64);
    for _ in 0..200_000 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        sum = sum.wrapping_add(random);
        fraction = fraction.mul_add(1.000_000_1, 0.5);
    }
    (random, sum, fraction.to_bits())
}

static HANDLED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
static SUM: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
/// Number of signals that the victim receives.
pub(super) const SIGNALS: u64 = 1500;

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
        let result = unsafe { libc::poll(std::ptr::null_mut(), 0, 20) };
        interrupted += u32::from(result < 0 && errno() == libc::EINTR);
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
        let threads: Vec<_> = (0..4).map(|n| std::thread::spawn(move || n * 2)).collect();
        for (n, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), n * 2);
        }
    }
    println!("right");
}
