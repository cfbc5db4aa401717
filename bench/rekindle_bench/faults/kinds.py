"""The types of faults: the paper's in its classes and order (section 5.7), then types that the paper does not have."""

from dataclasses import dataclass
from typing import Literal

FAULTS = 10
"""Faults of one type in a run, as in the paper."""
Class = Literal["programming", "memory management", "corruption", "control"]
Method = Literal["code", "line", "stack", "cache", "overrun", "dma", "nothing"]


@dataclass(frozen=True)
class Kind:
    """A type of faults."""

    name: str
    of_class: Class
    method: Method
    """`code`: changes an instruction. `line`: a command to the guest's module. Others: written to the guest's RAM."""
    what: str
    count: int = FAULTS
    """Faults in one run."""
    paper: bool = True
    """Whether the paper has this type."""


KINDS = [
    Kind("destination", "programming", "code", "a bit of an instruction's destination is flipped"),
    Kind("pointer", "programming", "code", "a bit of a memory operand's address is flipped"),
    Kind("initialization", "programming", "code", "a store to the stack frame is deleted"),
    Kind("interface", "programming", "code", "an instruction that reads a parameter is deleted"),
    Kind("branch", "programming", "code", "a conditional branch or a repeat prefix is deleted"),
    Kind("loop", "programming", "code", "the condition of a backward branch is inverted"),
    Kind("panic", "programming", "line", "the kernel panics", count=1),
    Kind("wild", "programming", "line", "8 bytes are written to a random address", paper=False),
    Kind("alloc", "memory management", "line", "kmalloc returns NULL"),
    Kind("free", "memory management", "line", "memory in use is freed"),
    Kind("leak", "memory management", "line", "every second kfree frees nothing", count=1),
    Kind("bcopy", "memory management", "line", "a copy overruns an object, 1 byte to 4 pages"),
    Kind("stale", "memory management", "line", "memory is written after it was freed", paper=False),
    Kind(
        "overrun", "memory management", "overrun", "a copy overruns a page-cache frame, 1 byte to 4 pages", paper=False
    ),
    Kind("text", "corruption", "code", "a bit of an instruction is flipped"),
    Kind("stack", "corruption", "stack", "a bit of a used kernel stack is flipped"),
    Kind("nop", "corruption", "code", "an instruction is deleted"),
    Kind("cache", "corruption", "cache", "a bit of a page-cache frame is flipped", paper=False),
    Kind("dma", "corruption", "dma", "the network card is given a page-cache frame to receive into", paper=False),
    Kind("none", "control", "nothing", "nothing", count=0, paper=False),
]
BY_NAME = {kind.name: kind for kind in KINDS}
