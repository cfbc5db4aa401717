//! A victim that has a known value in every register while it waits or computes, and compares all values afterwards.

use super::program::errno;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

/// The general registers in this sequence: rax, rbx, rcx, rdx, rsi, rdi, rbp, r8 to r15. `hold` loads the first array,
/// and stores to the second, which ends with the first and the last word of the red zone.
static GENERAL: [AtomicU64; 15] = [const { AtomicU64::new(0) }; 15];
static FOUND_GENERAL: [AtomicU64; 17] = [const { AtomicU64::new(0) }; 17];

/// An XSAVE area.
#[repr(C, align(64))]
struct Extended([AtomicU64; 2048]);

impl Extended {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; 2048])
    }

    fn words(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(SeqCst)).collect()
    }
}

static EXTENDED: Extended = Extended::new();
static FOUND_EXTENDED: Extended = Extended::new();
static COMPILED_CODES_EXTENDED: Extended = Extended::new();

/// Whether `hold` is to end, and how often it has checked that.
static SPIN: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];

/// What the victim does with its registers filled.
struct Work {
    number: i64,
    arguments: [u64; 4],
    result: u64,
    /// Computes after the call until the test sets the first word of [`SPIN`].
    spins: bool,
}

/// The program of the victims `state-read`, `state-epoll`, `state-poll` and `state-spin`.
pub(super) fn hold_state(kind: &str) {
    let byte = AtomicU64::new(0);
    let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
    // SAFETY: the arguments are of the types that the calls expect.
    let epoll = unsafe { libc::epoll_create1(0) };
    // SAFETY: as above.
    unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, 0, &raw mut event) };
    let event = &raw mut event as u64;
    let getpid =
        Work { number: libc::SYS_getpid, arguments: [1, 2, 3, 4], result: std::process::id().into(), spins: false };
    let work = match kind {
        "state-read" => {
            Work { number: libc::SYS_read, arguments: [0, byte.as_ptr() as u64, 1, 4], result: 1, ..getpid }
        }
        "state-epoll" => {
            Work { number: libc::SYS_epoll_wait, arguments: [epoll as u64, event, 1, u64::MAX], result: 1, ..getpid }
        }
        // With a time-out, which restarts through `restart_syscall`.
        "state-poll" => {
            Work { number: libc::SYS_poll, arguments: [&raw mut poll as u64, 1, 50_000, 4], result: 1, ..getpid }
        }
        _ => Work { spins: true, ..getpid },
    };
    fill_extended();
    let surroundings = set_surroundings();
    SPIN[0].store(1, SeqCst);
    let expected = run_with_state(&work, &getpid);
    SPIN[0].store(u32::from(!work.spins), SeqCst);
    SPIN[1].store(0, SeqCst);
    println!("started{}", SPIN.as_ptr() as u64);
    let found = run_with_state(&work, &work);
    assert!(found == expected, "registers changed: {found:x?} instead of {expected:x?}");
    assert_eq!(surroundings, Surroundings::current());
    println!("right");
}

/// Values found in the registers after the call, without its result.
#[derive(Debug, PartialEq)]
struct Found {
    general: Vec<u64>,
    extended: Vec<u64>,
}

/// Fills the registers with the arguments of `work` and with numbers, makes `call`, checks its result, and returns
/// the values found afterwards.
fn run_with_state(work: &Work, call: &Work) -> Found {
    for (index, register) in GENERAL.iter().enumerate() {
        register.store(0x1111_2222_3333_4444u64.wrapping_mul(index as u64 + 1), SeqCst);
    }
    let [rdi, rsi, rdx, r10] = work.arguments;
    for (index, value) in [(0, call.number as u64), (5, rdi), (4, rsi), (3, rdx), (9, r10)] {
        GENERAL[index].store(value, SeqCst);
    }
    hold();
    let found: Vec<_> = FOUND_GENERAL.iter().map(|word| word.load(SeqCst)).collect();
    assert_eq!(found[0], call.result, "result of the call");
    Found { general: found[1..].to_vec(), extended: FOUND_EXTENDED.words() }
}

/// Fills the vector and floating-point registers of [`EXTENDED`].
fn fill_extended() {
    // SAFETY: stores to an area that is large enough for all components but AMX's, which are not stored.
    unsafe {
        asm!("xsave64 [rip + {area}]", area = sym EXTENDED, in("eax") 0xff, in("edx") 0);
    }
    let area = EXTENDED.0.as_ptr() as *mut u8;
    let set = |offset: usize, bytes: usize| {
        for at in offset..offset + bytes {
            // SAFETY: inside the area, which only this thread uses.
            unsafe { area.add(at).write(at as u8 | 1) };
        }
    };
    let mut present = 0b11;
    // st0 to st7, xmm0 to xmm15.
    (0..8).for_each(|register| set(32 + 16 * register, 10));
    set(160, 256);
    let has_avx512 = std::is_x86_feature_detected!("avx512f");
    for (component, is_there) in
        [(2, std::is_x86_feature_detected!("avx")), (5, has_avx512), (6, has_avx512), (7, has_avx512)]
    {
        if is_there {
            let description = __cpuid_count(0xd, component);
            set(description.ebx as usize, description.eax as usize);
            present |= 1 << component;
        }
    }
    EXTENDED.0[512 / 8].fetch_or(present, SeqCst);
    // MXCSR: rounds to zero.
    // SAFETY: inside the area.
    unsafe { area.add(24).cast::<u32>().write(0x7f80) };
}

/// Loads all registers, makes the system call, waits until [`SPIN`] permits the end, and stores all registers.
fn hold() {
    // SAFETY: all registers are restored or declared; the memory below the stack pointer is unused, since the block may
    // use the stack.
    unsafe {
        asm!(
            "push rbx",
            "push rbp",
            "mov eax, 0xff",
            "xor edx, edx",
            "xsave64 [rip + {compiled}]",
            "xrstor64 [rip + {extended}]",
            "mov rax, [rip + {general}]",
            "mov rbx, [rip + {general} + 8]",
            "mov rdx, [rip + {general} + 24]",
            "mov rsi, [rip + {general} + 32]",
            "mov rdi, [rip + {general} + 40]",
            "mov rbp, [rip + {general} + 48]",
            "mov r8, [rip + {general} + 56]",
            "mov r9, [rip + {general} + 64]",
            "mov r10, [rip + {general} + 72]",
            "mov r12, [rip + {general} + 88]",
            "mov r13, [rip + {general} + 96]",
            "mov r14, [rip + {general} + 104]",
            "mov r15, [rip + {general} + 112]",
            "mov [rsp - 8], r14",
            "mov [rsp - 128], r15",
            "syscall",
            // The call has changed these two.
            "mov rcx, [rip + {general} + 16]",
            "mov r11, [rip + {general} + 80]",
            "2:",
            "inc dword ptr [rip + {spin} + 4]",
            "cmp dword ptr [rip + {spin}], 0",
            "je 2b",
            "mov [rip + {found}], rax",
            "mov [rip + {found} + 8], rbx",
            "mov [rip + {found} + 16], rcx",
            "mov [rip + {found} + 24], rdx",
            "mov [rip + {found} + 32], rsi",
            "mov [rip + {found} + 40], rdi",
            "mov [rip + {found} + 48], rbp",
            "mov [rip + {found} + 56], r8",
            "mov [rip + {found} + 64], r9",
            "mov [rip + {found} + 72], r10",
            "mov [rip + {found} + 80], r11",
            "mov [rip + {found} + 88], r12",
            "mov [rip + {found} + 96], r13",
            "mov [rip + {found} + 104], r14",
            "mov [rip + {found} + 112], r15",
            "mov rax, [rsp - 8]",
            "mov [rip + {found} + 120], rax",
            "mov rax, [rsp - 128]",
            "mov [rip + {found} + 128], rax",
            "mov eax, 0xff",
            "xor edx, edx",
            "xsave64 [rip + {found_extended}]",
            "xrstor64 [rip + {compiled}]",
            "pop rbp",
            "pop rbx",
            compiled = sym COMPILED_CODES_EXTENDED,
            extended = sym EXTENDED,
            general = sym GENERAL,
            spin = sym SPIN,
            found = sym FOUND_GENERAL,
            found_extended = sym FOUND_EXTENDED,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            clobber_abi("sysv64"),
        );
    }
}

/// State of the thread that is in no register.
#[derive(Debug, PartialEq)]
struct Surroundings {
    blocked_signal: i32,
    alternate_stack: (usize, usize, i32),
}

const BLOCKED_SIGNAL: i32 = libc::SIGUSR2;

/// Blocks a signal and sets an alternate signal stack.
fn set_surroundings() -> Surroundings {
    let memory = Box::leak(vec![0u8; 64 << 10].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: memory.len() };
    // SAFETY: the memory is never freed, and the mask lives through the calls.
    unsafe {
        assert_eq!(libc::sigaltstack(&raw const stack, std::ptr::null_mut()), 0);
        let mut mask = std::mem::zeroed::<libc::sigset_t>();
        libc::sigaddset(&raw mut mask, BLOCKED_SIGNAL);
        assert_eq!(libc::sigprocmask(libc::SIG_BLOCK, &raw const mask, std::ptr::null_mut()), 0);
    }
    let surroundings = Surroundings::current();
    assert_eq!(surroundings.blocked_signal, BLOCKED_SIGNAL);
    assert_eq!(surroundings.alternate_stack.1, memory.len());
    surroundings
}

impl Surroundings {
    fn current() -> Self {
        // SAFETY: the kernel writes to records that live through the calls and may be zero.
        unsafe {
            let mut stack = std::mem::zeroed::<libc::stack_t>();
            assert_eq!(libc::sigaltstack(std::ptr::null(), &raw mut stack), 0);
            let mut mask = std::mem::zeroed::<libc::sigset_t>();
            assert_eq!(libc::sigprocmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask), 0);
            let blocked_signal = (1..=64).find(|&signal| libc::sigismember(&raw const mask, signal) == 1);
            Self {
                blocked_signal: blocked_signal.unwrap_or(0),
                alternate_stack: (stack.ss_sp as usize, stack.ss_size, stack.ss_flags),
            }
        }
    }
}

/// Waits for a byte with a stack that has no room for a signal frame.
pub(super) fn read_byte_with_full_stack() {
    const PAGE: usize = 4096;
    let (none, byte) = (std::ptr::null_mut(), AtomicU64::new(0));
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice, whose first page is made inaccessible.
    let stack = unsafe { libc::mmap(none, 2 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::mprotect(stack, PAGE, libc::PROT_NONE) }, 0, "{}", errno());
    println!("started");
    let result: i64;
    // SAFETY: the stack is exchanged only for the call, which writes one byte.
    unsafe {
        asm!(
            "xchg rsp, r12",
            "syscall",
            "xchg rsp, r12",
            inlateout("rax") libc::SYS_read => result,
            in("rdi") 0,
            in("rsi") byte.as_ptr(),
            in("rdx") 1,
            inlateout("r12") stack as usize + PAGE + 256 => _,
            out("rcx") _, out("r11") _,
        );
    }
    assert_eq!(result, 1);
    println!("right");
}
