"""Faults in the guest's code: replacements of instructions of its kernel.

The paper's tool (from Nooks) changes the code inside the kernel. This module reads the kernel's code from the guest's
RAM and decodes it outside of the guest. A module in the guest then makes the change, since a QEMU that translates code
does not notice writes from outside.
"""

import random
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import capstone
from capstone import x86

KERNEL_BASE = 0xFFFFFFFF80000000
"""Virtual address of physical address 0 in the kernel's image on x86-64 (the guest runs with `nokaslr`)."""
NOP = 0x90
"""Opcode of the instruction that does nothing."""

RUN_UNDER_LOAD = re.compile(
    r"(_?_?filemap|page_cache|_?_?folio|find_get|mpage|blkdev|_?_?blk_mq|_?_?bio_|submit_bio|_?_?block_|create_empty_buffers"
    r"|generic_file|generic_perform|balance_dirty|writeback|wb_|write_cache|virtqueue|_?_?sock_|udp_|_?_?ip_|_?_?dev_"
    r"|_?_?napi|net_rx|_?_?netif|_?_?tcp_|_?_?skb_|_?_?alloc_skb|consume_skb|sk_|_?_?kmem_cache|_?_?kmalloc|kfree|___slab"
    r"|rmqueue|get_page_from|_?_?alloc_pages|free_unref|try_to_wake|_?_?schedule|pick_next|enqueue|dequeue|update_curr"
    r"|vfs_|ksys_|copy_page|_copy|shrink_|lru_|xas_|_?_?mod_|hrtimer|ep_|do_epoll)"
)
"""Functions that a guest executes when it reads, writes, sends and receives."""
_PARAMETERS = {x86.X86_REG_RDI, x86.X86_REG_RSI, x86.X86_REG_RDX, x86.X86_REG_RCX, x86.X86_REG_R8, x86.X86_REG_R9} | {
    x86.X86_REG_EDI, x86.X86_REG_ESI, x86.X86_REG_EDX, x86.X86_REG_ECX, x86.X86_REG_R8D, x86.X86_REG_R9D
}  # fmt: skip
_FRAME = {x86.X86_REG_RSP, x86.X86_REG_RBP}
_PROLOGUE = 16
"""Number of instructions at the start of a function in which it reads its parameters."""
_REPEAT = (0xF2, 0xF3)
"""Prefixes that repeat a string instruction: REPNE, REP."""


@dataclass(frozen=True)
class Change:
    """Bytes of the kernel's code, and their replacement."""

    address: int
    old: bytes
    new: bytes

    @property
    def line(self) -> str:
        """Returns the command for the guest's module."""
        return f"poke {self.address:x} {self.old.hex()} {self.new.hex()}"


def _decoder() -> capstone.Cs:
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    return decoder


@dataclass
class Code:
    """The functions of a kernel."""

    symbols: list[tuple[int, str]]
    """Start addresses in order; including data symbols, since each ends the previous function."""
    text: bytes
    """Machine code, from address `start` on."""
    start: int
    _decoder: capstone.Cs = field(default_factory=_decoder)

    @classmethod
    def span(cls, kallsyms: str) -> tuple[list[tuple[int, str]], int, int]:
        """Parses /proc/kallsyms: returns the kernel's own symbols, and the bounds of its code (virtual addresses)."""
        symbols, known = [], {}
        for line in kallsyms.splitlines():
            parts = line.split()
            if len(parts) == 3:  # a fourth part is a module's name
                known[parts[2]] = int(parts[0], 16)
                symbols.append((int(parts[0], 16), parts[2] if parts[1] in "tT" else ""))
        if "_stext" not in known or "_etext" not in known:
            raise ValueError("kallsyms has no _stext and _etext; it is read by root only")
        start, end = known["_stext"], known["_etext"]
        return sorted(symbol for symbol in symbols if start <= symbol[0] <= end), start, end

    def run_under_load(self) -> list[int]:
        """Indices of the symbols of functions that a guest under load executes."""
        return [
            symbol
            for symbol, (address, name) in enumerate(self.symbols[:-1])
            # Leaves out stubs, and distances that are too long for one function.
            if RUN_UNDER_LOAD.match(name) and 8 < self.symbols[symbol + 1][0] - address < 1 << 14
        ]

    def name(self, address: int) -> str:
        """Returns the name of the function that contains an address."""
        index = bisect_right(self.symbols, (address, "\U0010ffff")) - 1
        return f"{self.symbols[index][1]}+{address - self.symbols[index][0]:#x}"

    def instructions(self, symbol: int) -> list[capstone.CsInsn]:
        """Returns the instructions of a function."""
        begin, end = self.symbols[symbol][0], self.symbols[symbol + 1][0]
        return list(self._decoder.disasm(self.text[begin - self.start : end - self.start], begin))

    def changes(self, kind: str, rng: random.Random) -> Iterator[Change]:
        """Yields faults of a kind, without end, in functions that the guest executes."""
        functions = self.run_under_load()
        if not functions:
            raise ValueError("the kernel has none of the functions that are known to be run")
        changed: set[int] = set()  # addresses
        while True:
            instructions = self.instructions(rng.choice(functions))
            possible = [
                (instruction, new)
                for index, instruction in enumerate(instructions)
                if instruction.address not in changed
                for new in self.faulty(kind, index, instruction)
            ]
            if possible:
                instruction, new = rng.choice(possible)
                changed.add(instruction.address)
                yield Change(instruction.address, bytes(instruction.bytes), new)

    def faulty(self, kind: str, index: int, instruction: capstone.CsInsn) -> list[bytes]:
        """Returns replacements of the instruction with this index in its function; none if the fault does not apply."""
        old = bytes(instruction.bytes)
        nops = bytes([NOP]) * len(old)
        if instruction.id == x86.X86_INS_NOP:
            return []
        match kind:
            case "text":
                return list(_flips(old))
            case "nop":
                return [nops]
            case "initialization":
                return [nops] if _stores_to_frame(instruction) else []
            case "interface":
                return [nops] if index < _PROLOGUE and _reads_parameter(instruction) else []
            case "branch":
                if old[0] in _REPEAT and instruction.id in _STRING:
                    return [bytes([NOP]) + old[1:]]
                return [nops] if _is_conditional(old) else []
            case "loop":
                return _inverted(instruction, old)
            case "destination" | "pointer":
                return [new for new in _flips(old) if self._is_another(kind, instruction, new)]
        raise ValueError(f"no fault in code: {kind}")

    def _is_another(self, kind: str, old: capstone.CsInsn, new: bytes) -> bool:
        """Returns whether the flipped bit changes only the destination register, or only a memory operand's address."""
        decoded = list(self._decoder.disasm(new, old.address))
        if len(decoded) != 1 or decoded[0].size != old.size or decoded[0].id != old.id or not old.operands:
            return False
        before, after = ([_operand(each) for each in instruction.operands] for instruction in (old, decoded[0]))
        if len(before) != len(after):
            return False
        different = [index for index in range(len(before)) if before[index] != after[index]]
        if len(different) != 1:
            return False
        operand = old.operands[different[0]]
        if kind == "destination":
            return operand.type == x86.X86_OP_REG and different[0] == 0 and bool(operand.access & capstone.CS_AC_WRITE)
        return operand.type == x86.X86_OP_MEM and old.id != x86.X86_INS_LEA


_STRING = {
    x86.X86_INS_MOVSB, x86.X86_INS_MOVSQ, x86.X86_INS_MOVSW, x86.X86_INS_STOSB, x86.X86_INS_STOSQ, x86.X86_INS_STOSD,
    x86.X86_INS_CMPSB, x86.X86_INS_SCASB,
}  # fmt: skip


def _flips(old: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(old)):
        new = bytearray(old)
        new[bit // 8] ^= 1 << bit % 8
        yield bytes(new)


def _operand(operand: x86.X86Op) -> tuple[int, ...]:
    if operand.type == x86.X86_OP_REG:
        return (operand.type, operand.reg)
    if operand.type == x86.X86_OP_IMM:
        return (operand.type, operand.imm)
    memory = operand.mem
    return (operand.type, memory.segment, memory.base, memory.index, memory.scale, memory.disp)


def _stores_to_frame(instruction: capstone.CsInsn) -> bool:
    if instruction.id != x86.X86_INS_MOV or len(instruction.operands) != 2:
        return False
    target = instruction.operands[0]
    return target.type == x86.X86_OP_MEM and target.mem.base in _FRAME and target.mem.index == x86.X86_REG_INVALID


def _reads_parameter(instruction: capstone.CsInsn) -> bool:
    if instruction.id != x86.X86_INS_MOV or len(instruction.operands) != 2:
        return False
    target, source = instruction.operands
    return target.type == x86.X86_OP_REG and source.type == x86.X86_OP_REG and source.reg in _PARAMETERS


def _is_conditional(old: bytes) -> bool:
    """Returns whether an instruction is a conditional jump (Jcc), short or near."""
    return 0x70 <= old[0] <= 0x7F or (len(old) == 6 and old[0] == 0x0F and 0x80 <= old[1] <= 0x8F)


def _inverted(instruction: capstone.CsInsn, old: bytes) -> list[bytes]:
    """Returns a backward branch with the opposite condition, which is the lowest bit of the opcode."""
    if not _is_conditional(old) or instruction.operands[0].imm > instruction.address:
        return []
    at = 0 if old[0] != 0x0F else 1
    return [old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]]
