"""The types of faults: the paper's in its classes and order (section 5.7), then types that the paper does not have."""

from dataclasses import dataclass
from typing import Literal

Class = Literal["programming", "memory management", "corruption", "control"]
Method = Literal["code", "line", "stack", "cache", "overrun", "dma", "nothing"]


@dataclass(frozen=True)
class Kind:
    """A type of faults."""

    name: str
    of_class: Class
    method: Method
    """`code`: changes an instruction. `line`: a command to the guest's module. Others: written to the guest's RAM."""
    paper: bool
    """Whether the paper has this type."""
    count: int
    """Faults in one run."""
    what: str


FAULTS = 10
"""Faults of one type in a run, as in the paper."""

KINDS = [
    Kind("destination", "programming", "code", True, FAULTS, "a bit of an instruction's destination is flipped"),
    Kind("pointer", "programming", "code", True, FAULTS, "a bit of a memory operand's address is flipped"),
    Kind("initialization", "programming", "code", True, FAULTS, "a store to the stack frame is deleted"),
    Kind("interface", "programming", "code", True, FAULTS, "an instruction that reads a parameter is deleted"),
    Kind("branch", "programming", "code", True, FAULTS, "a conditional branch or a repeat prefix is deleted"),
    Kind("loop", "programming", "code", True, FAULTS, "the condition of a backward branch is inverted"),
    Kind("panic", "programming", "line", True, 1, "the kernel panics"),
    Kind("wild", "programming", "line", False, FAULTS, "8 bytes are written to a random address"),
    Kind("alloc", "memory management", "line", True, FAULTS, "kmalloc returns NULL"),
    Kind("free", "memory management", "line", True, FAULTS, "memory in use is freed"),
    Kind("leak", "memory management", "line", True, 1, "every second kfree frees nothing"),
    Kind("bcopy", "memory management", "line", True, FAULTS, "a copy overruns an object, 1 byte to 4 pages"),
    Kind("stale", "memory management", "line", False, FAULTS, "memory is written after it was freed"),
    Kind(
        "overrun",
        "memory management",
        "overrun",
        False,
        FAULTS,
        "a copy overruns a page-cache frame, 1 byte to 4 pages",
    ),
    Kind("text", "corruption", "code", True, FAULTS, "a bit of an instruction is flipped"),
    Kind("stack", "corruption", "stack", True, FAULTS, "a bit of a used kernel stack is flipped"),
    Kind("nop", "corruption", "code", True, FAULTS, "an instruction is deleted"),
    Kind("cache", "corruption", "cache", False, FAULTS, "a bit of a page-cache frame is flipped"),
    Kind("dma", "corruption", "dma", False, FAULTS, "the network card is given a page-cache frame to receive into"),
    Kind("none", "control", "nothing", False, 0, "nothing"),
]
BY_NAME = {kind.name: kind for kind in KINDS}
