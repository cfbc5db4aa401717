//! The signal frame from which a thread restores its registers if the tracing process dies during an injected call.
//!
//! A signal frame is what the kernel writes to a thread's stack before it runs a signal handler (`struct rt_sigframe`
//! in `arch/x86/include/asm/sigframe.h`). The system call `rt_sigreturn` loads all registers and the signal mask from
//! it. We write one to the place that the kernel would choose, below the red zone: a program must expect that a signal
//! handler overwrites that memory at any time, so nothing of the program is there.
//!
//! ```text
//! own stack pointer ->           +------------------------------+
//!                                | red zone, 128 bytes          |
//!                                +------------------------------+
//!                                | extended registers (XSAVE)   |  aligned to 64 bytes
//!                                | ucontext: general registers, |
//!                                |   signal mask                |
//! stack pointer of the call ->   | address of the restorer      |
//!                                +------------------------------+
//! ```
//!
//! An injected call is made by the instructions `syscall; ret`. The tracer restores the registers before `ret`. Without
//! a tracer, `ret` continues at the restorer, which calls `rt_sigreturn`.

use libc::user_regs_struct;

/// Memory below the stack pointer that belongs to the running function (System V ABI for x86-64).
const RED_ZONE_BYTES: u64 = 128;
/// Alignment that the processor requires for its extended registers.
const EXTENDED_ALIGNMENT: u64 = 64;
/// Words of `struct rt_sigframe` before its `siginfo`, which `rt_sigreturn` does not read.
const FRAME_WORDS: usize = 39;

/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS` (`asm/ucontext.h`), as in every frame of the kernel.
const UCONTEXT_FLAGS: u64 = 1 | 2 | 4;
/// No valid value of `ss_flags`: `rt_sigreturn` then leaves the alternate signal stack as it is (`restore_altstack` in
/// `kernel/signal.c` ignores all errors but that of reading the frame).
const KEEP_ALTERNATE_STACK: u64 = 4;

/// `FP_XSTATE_MAGIC1` of `asm/sigcontext.h`, at the start of the bytes that the processor leaves to software.
const MAGIC_START: u64 = 0x4650_5853;
/// `FP_XSTATE_MAGIC2`, after the extended registers.
const MAGIC_END: u64 = 0x4650_5845;
/// Words of the extended registers as ptrace and signal frames have them: `sw_reserved` (ptrace: the components that
/// this kernel uses) and the header's `XSTATE_BV` (the components that are not in their initial state).
const SOFTWARE_WORD: usize = 464 / 8;
const PRESENT_WORD: usize = 512 / 8;
/// Bytes of the smallest XSAVE area: the legacy region and the header.
pub(super) const MIN_EXTENDED_BYTES: usize = 576;
/// Bytes of the largest extended registers, with room for later processors (AMX: 11008).
pub(super) const MAX_EXTENDED_BYTES: usize = 32 << 10;

/// Components of the extended registers, as bits.
const X87_AND_SSE: u64 = 0b11;
const PROTECTION_KEYS: u64 = 1 << 9;
/// Components for which a thread has memory only after it has used them (`XFEATURE_MASK_USER_DYNAMIC`: AMX tiles).
const DYNAMIC: u64 = 1 << 18;

/// The results with which the kernel restarts a system call (`linux/errno.h`): the call has had no effect.
pub(super) const RESTART_RESULTS: [i64; 4] = [-512, -513, -514, -516];
/// Length of the `syscall` instruction.
pub(super) const SYSCALL_INSTRUCTION_BYTES: u64 = 2;

/// The state of a stopped thread that a signal frame holds.
#[derive(Debug)]
pub(super) struct ThreadState {
    pub(super) registers: user_regs_struct,
    pub(super) signal_mask: u64,
    /// As from `PTRACE_GETREGSET` with `NT_X86_XSTATE`, at least [`MIN_EXTENDED_BYTES`].
    pub(super) extended_registers: Vec<u64>,
}

/// A signal frame, with the address at which it must be.
#[derive(Debug)]
pub(super) struct SignalFrame {
    /// The stack pointer for an injected call.
    pub(super) address: u64,
    pub(super) words: Vec<[u8; 8]>,
}

impl SignalFrame {
    /// Builds the frame of a thread whose process has its restorer at address `restorer`. Returns `None` if the stack
    /// pointer is too small to be an address in a stack.
    ///
    /// `end_of` returns the end of one component of the extended registers, in bytes: [`end_of_component`].
    pub(super) fn new(state: ThreadState, restorer: u64, end_of: impl Fn(u32) -> usize) -> Option<Self> {
        let extended = mark_for_signal_frame(state.extended_registers, end_of);
        let stack_top = state.registers.rsp.checked_sub(RED_ZONE_BYTES)?;
        let extended_address = stack_top.checked_sub(8 * extended.len() as u64)? & !(EXTENDED_ALIGNMENT - 1);
        let address = extended_address.checked_sub(8 * FRAME_WORDS as u64)?;
        let general = general_words(&state.registers, state.signal_mask, restorer, extended_address);
        let words = general.into_iter().chain(extended).map(u64::to_ne_bytes).collect();
        Some(Self { address, words })
    }
}

/// Returns `struct rt_sigframe` up to its `siginfo`.
fn general_words(own: &user_regs_struct, signal_mask: u64, restorer: u64, extended_address: u64) -> [u64; FRAME_WORDS] {
    let Resumption { rip, rax } = resumption(own);
    let segments = own.cs & 0xffff | (own.ss & 0xffff) << 48;
    #[rustfmt::skip]
    let words = [
        restorer,
        UCONTEXT_FLAGS, 0,
        0, KEEP_ALTERNATE_STACK, 0,
        // struct sigcontext
        own.r8, own.r9, own.r10, own.r11, own.r12, own.r13, own.r14, own.r15,
        own.rdi, own.rsi, own.rbp, own.rbx, own.rdx, rax, own.rcx, own.rsp, rip, own.eflags,
        segments, 0, 0, 0, 0, extended_address,
        0, 0, 0, 0, 0, 0, 0, 0,
        // uc_sigmask
        signal_mask,
    ];
    words
}

/// Where a thread continues.
struct Resumption {
    rip: u64,
    rax: u64,
}

/// Returns where a thread that may be in an interrupted system call continues, such that the call is made again. The
/// kernel does not do that after `rt_sigreturn`.
fn resumption(own: &user_regs_struct) -> Resumption {
    let is_interrupted = own.orig_rax as i64 >= 0 && RESTART_RESULTS.contains(&(own.rax as i64));
    match own.orig_rax as i64 {
        _ if !is_interrupted => Resumption { rip: own.rip, rax: own.rax },
        // The call had been interrupted before, and its number is no longer known.
        libc::SYS_restart_syscall => Resumption { rip: own.rip, rax: -i64::from(libc::EINTR) as u64 },
        _ => Resumption { rip: own.rip.wrapping_sub(SYSCALL_INSTRUCTION_BYTES), rax: own.orig_rax },
    }
}

/// Turns the extended registers as ptrace reads them into those of a signal frame: states which components are valid
/// and where they end.
///
/// Linux expects the mark of the end after the size that the frame states, or (between commit dc8aa31a7ac2 and its
/// revert) after the size of the thread's memory for extended registers. The latter includes the dynamic components if
/// the thread has ever used one, which is not visible from outside: so both ends are marked.
fn mark_for_signal_frame(mut extended: Vec<u64>, end_of: impl Fn(u32) -> usize) -> Vec<u64> {
    let word_of = |extended: &[u64], index: usize| extended.get(index).copied().unwrap_or_default();
    let components = word_of(&extended, SOFTWARE_WORD);
    // ptrace provides the value of the protection keys in any case, but may not mark them as present.
    let present = word_of(&extended, PRESENT_WORD) | X87_AND_SSE | components & PROTECTION_KEYS;
    let all_bytes = 8 * extended.len();
    let bytes = if components & DYNAMIC == 0 || present & DYNAMIC != 0 {
        all_bytes
    } else {
        let others = (2..u64::BITS).filter(|bit| components & !DYNAMIC & 1 << bit != 0);
        others.map(end_of).fold(MIN_EXTENDED_BYTES, usize::max).min(all_bytes)
    };
    extended.push(0);
    let marks = [
        (SOFTWARE_WORD, MAGIC_START | (bytes as u64 + 4) << 32),
        (SOFTWARE_WORD + 1, components),
        (SOFTWARE_WORD + 2, bytes as u64),
        (PRESENT_WORD, present),
        (bytes / 8, MAGIC_END),
        (all_bytes / 8, MAGIC_END),
    ];
    for (index, value) in marks {
        if let Some(word) = extended.get_mut(index) {
            *word = value;
        }
    }
    extended
}

/// Returns the end of one component of the extended registers of this processor, in bytes.
pub(super) fn end_of_component(component: u32) -> usize {
    /// "Processor extended state enumeration": of a component, EAX is the size and EBX the offset.
    const LEAF: u32 = 0xd;
    let description = std::arch::x86_64::__cpuid_count(LEAF, component);
    description.ebx as usize + description.eax as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor with AMX: 17 is the tiles' configuration, 18 their data.
    fn amx_end_of(component: u32) -> usize {
        match component {
            2 => 832,
            9 => 2696,
            17 => 2816,
            18 => 11008,
            _ => panic!("component {component}"),
        }
    }

    fn amx_registers(present: u64) -> Vec<u64> {
        let mut extended = vec![0x5555; 11008 / 8];
        extended[SOFTWARE_WORD] = 0b111 | PROTECTION_KEYS | 1 << 17 | DYNAMIC;
        extended[PRESENT_WORD] = present;
        extended
    }

    #[test]
    fn both_possible_ends_are_marked_and_no_component_in_use_is_overwritten() {
        let marked = mark_for_signal_frame(amx_registers(0b111), amx_end_of);
        assert_eq!(marked[SOFTWARE_WORD], MAGIC_START | 2820 << 32);
        assert_eq!(marked[SOFTWARE_WORD + 2], 2816);
        assert_eq!((marked[2816 / 8], marked[11008 / 8]), (MAGIC_END, MAGIC_END));
        assert_eq!(marked[PRESENT_WORD], 0b111 | PROTECTION_KEYS);
        assert!(marked[PRESENT_WORD + 1..2816 / 8].iter().all(|&word| word == 0x5555));

        let marked = mark_for_signal_frame(amx_registers(0b111 | DYNAMIC), amx_end_of);
        assert_eq!(marked[SOFTWARE_WORD + 2], 11008);
        assert_eq!(marked[11008 / 8], MAGIC_END);
        assert!(marked[PRESENT_WORD + 1..11008 / 8].iter().all(|&word| word == 0x5555));
    }

    #[test]
    fn an_interrupted_call_is_made_again() {
        // SAFETY: registers are numbers and may be zero.
        let running = user_regs_struct { rip: 0x1002, ..unsafe { std::mem::zeroed() } };
        let after = |orig_rax: i64, rax: i64| {
            let state = user_regs_struct { orig_rax: orig_rax as u64, rax: rax as u64, ..running };
            let Resumption { rip, rax } = resumption(&state);
            (rip, rax as i64)
        };
        for result in RESTART_RESULTS {
            assert_eq!(after(libc::SYS_read, result), (0x1000, libc::SYS_read));
        }
        assert_eq!(after(libc::SYS_read, -i64::from(libc::EINTR)), (0x1002, -i64::from(libc::EINTR)));
        assert_eq!(after(libc::SYS_restart_syscall, -516), (0x1002, -i64::from(libc::EINTR)));
        assert_eq!(after(-1, -512), (0x1002, -512), "it is not in a call: the number is a value of the program");
    }
}
