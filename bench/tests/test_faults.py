"""The fault experiment: changes of code and of memory, and figures from invented rows.

A fault damages a running guest's kernel: its code, its stacks, or the frames (pages of physical memory) of its page
cache. The experiment then counts blocks of the disk that are read wrong, with the server's check of digests and,
as a control, without.
"""

import json
import random
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rekindle_bench.faults import analysis, plots
from rekindle_bench.faults.cases import in_lanes, jobs
from rekindle_bench.faults.code import Code
from rekindle_bench.faults.damaged_guests import complaints
from rekindle_bench.faults.kinds import KINDS
from rekindle_bench.faults.plan import FULL, Plan
from rekindle_bench.faults.ram import PAGE, Ram
from rekindle_bench.faults.rows import Row, read
from rekindle_bench.rows import RowFile

START = 0xFFFFFFFF81000000
# mov rbp, rdi; mov [rsp+8], rax; add rax, rbx; mov rcx, [rbp+0x10]; L: dec rcx; jne L; rep movsb; nop; ret
TEXT = bytes.fromhex("4889fd 4889442408 4801d8 488b4d10 48ffc9 75fb f3a4 90 c3")
KALLSYMS = f"""{START:016x} T _stext
{START:016x} T filemap_read
{START + len(TEXT):016x} t other_function
{START + 64:016x} T _etext
ffffffffc0000000 t virtblk_probe\t[virtio_blk]
"""


@pytest.fixture
def code() -> Code:
    symbols, start, end = Code.span(KALLSYMS)
    assert (start, end) == (START, START + 64)
    assert not any("virtblk" in name for _, name in symbols)
    return Code(symbols=symbols, text=TEXT.ljust(64, b"\x90"), start=start)


def possible(code: Code, kind: str) -> dict[str, list[bytes]]:
    replacements = {}
    for index, instruction in enumerate(code.instructions(code.run_under_load()[0])):
        if new := code.faulty(kind, index, instruction):
            replacements[f"{instruction.mnemonic} {instruction.op_str}"] = new
    return replacements


def test_each_code_fault_applies_to_its_instructions(code):
    """Expected replacements are written by hand for the instructions of `TEXT`."""
    assert possible(code, "initialization") == {"mov qword ptr [rsp + 8], rax": [b"\x90" * 5]}
    assert possible(code, "interface") == {"mov rbp, rdi": [b"\x90" * 3]}
    branches = possible(code, "branch")
    assert set(branches) == {f"jne {START + 15:#x}", "rep movsb byte ptr [rdi], byte ptr [rsi]"}
    assert [b"\x90\xa4"] in branches.values()
    assert list(possible(code, "loop").values()) == [[b"\x74\xfb"]]
    pointers = possible(code, "pointer")
    assert set(pointers) == {"mov qword ptr [rsp + 8], rax", "mov rcx, qword ptr [rbp + 0x10]"}
    assert bytes.fromhex("488b4d11") in pointers["mov rcx, qword ptr [rbp + 0x10]"]
    destinations = possible(code, "destination")
    assert bytes.fromhex("4801d9") in destinations["add rax, rbx"], "rcx instead of rax"
    assert bytes.fromhex("4801c8") not in destinations["add rax, rbx"], "that is the source"
    assert len(possible(code, "nop")) == 8, "all but the nop itself"
    assert all(len(new) == 8 * len(new[0]) for new in possible(code, "text").values())


def test_no_instruction_is_changed_twice_and_the_module_gets_the_old_bytes(code):
    """Type `text` flips one bit; the module checks the old bytes before it writes the new ones."""
    changes = code.changes("text", random.Random(1))
    first_five = [next(changes) for _ in range(5)]
    assert len({change.address for change in first_five}) == 5
    for change in first_five:
        at = change.address - START
        assert TEXT[at : at + len(change.old)] == change.old
        assert sum((a ^ b).bit_count() for a, b in zip(change.old, change.new, strict=True)) == 1
        assert change.line == f"poke {change.address:x} {change.old.hex()} {change.new.hex()}"
    assert code.name(START + 3) == "filemap_read+0x3"


def test_hidden_kallsyms_are_rejected():
    """For other users than root, all addresses in /proc/kallsyms are 0."""
    with pytest.raises(ValueError, match="root"):
        Code.span("0000000000000000 T filemap_read\n")


BLOCKS, FRAMES = 8, 64
"""Blocks of the disk, and frames of the guest's memory."""
FRAME_OF_BLOCK = {block: 20 + 3 * block for block in range(BLOCKS)}
"""The frame that caches each block."""
DAMAGED_BLOCK = 1
"""One bit of its frame differs."""


@pytest.fixture
def memory(tmp_path: Path) -> tuple[Ram, np.ndarray, Path]:
    """Returns a guest's memory, the image of its disk, and the memory's file."""
    rng = np.random.default_rng(1)
    image = rng.integers(0, 1 << 63, (BLOCKS, PAGE // 8), dtype=np.uint64)
    frames = np.zeros((FRAMES, PAGE // 8), dtype=np.uint64)
    for block, frame in FRAME_OF_BLOCK.items():
        frames[frame] = image[block]
    frames[FRAME_OF_BLOCK[DAMAGED_BLOCK], 100] ^= np.uint64(4)
    path = tmp_path / "ram"
    path.write_bytes(frames.tobytes())
    return Ram(path), image, path


def changed_frames(path: Path, before: bytes) -> set[int]:
    after = path.read_bytes()
    return {at // PAGE for at in range(0, len(after), 8) if after[at : at + 8] != before[at : at + 8]}


def test_frames_of_the_page_cache_are_found_by_their_content(memory):
    """A frame that differs from its block in one bit is no copy of it, and a frame that was damaged no longer is."""
    ram, image, path = memory
    cached = ram.cached(image)
    assert cached == {frame: block for block, frame in FRAME_OF_BLOCK.items() if block != DAMAGED_BLOCK}
    before = path.read_bytes()
    hit = ram.flip_cached(cached, 3, random.Random(2))
    assert len(hit) == 3
    assert changed_frames(path, before) == set(hit)
    assert set(ram.cached(image)) == set(cached) - set(hit)


def test_a_copy_overruns_the_next_frames_but_not_the_end_of_memory(memory):
    """The frames that have changed are exactly those returned; the file does not grow."""
    ram, image, path = memory
    before = path.read_bytes()
    behind = ram.overrun_cached(ram.cached(image), 2, random.Random(3))
    assert changed_frames(path, before) == {frame for frames in behind for frame in frames}
    ram.write((FRAMES - 1) * PAGE + 4000, bytes(3 * PAGE))
    assert len(path.read_bytes()) == FRAMES * PAGE


def test_bits_of_used_stacks_are_flipped_and_no_others(memory):
    """The guest lists pieces of used stacks: task, address and length in hexadecimal. These two are adjacent."""
    ram, _, path = memory
    before = path.read_bytes()
    assert ram.flip_stacks("7 1ff0 10\n7 2000 8\n", 5, random.Random(4)) == 5
    differing = [at for at, (old, new) in enumerate(zip(before, path.read_bytes(), strict=True)) if old != new]
    assert differing
    assert all(0x1FF0 <= at < 0x2000 + 8 for at in differing)
    assert ram.flip_stacks("", 5, random.Random(4)) == 0


def test_the_card_is_given_frames_of_the_page_cache(memory):
    """The next four buffers (6, 7, 0, 1) may be in use; the two after them (2, 3) get the frames."""
    ram, image, _ = memory
    cached = ram.cached(image)
    size, table, ring = 8, 0, PAGE
    for n in range(size):
        ram.write(table + 16 * n, struct.pack("<QIHH", 0x100000 + n * PAGE, 1536, 0 if n == 6 else 2, 0))
    ram.write(ring, struct.pack("<HH8H", 0, 5, *range(size)))  # 65534 .. 5 are available
    queue = {"vring-num": size, "last-avail-idx": 65534, "vring-desc": table, "vring-avail": ring}
    frames = ram.give_to_card(queue, cached, 2, random.Random(5))
    assert len(frames) == 2
    assert set(frames) <= set(cached)
    addresses = [struct.unpack("<Q", ram.read(16 * n, 8))[0] for n in range(size)]
    # The next four buffers are not changed (6, 7, 0, 1).
    assert addresses[2:4] == [frame * PAGE for frame in frames]
    assert all(addresses[n] == 0x100000 + n * PAGE for n in (0, 1, 4, 5, 6, 7))


def test_blocks_of_runs_have_each_type_once():
    """A block of runs has one run of each type of faults. Finished runs are not repeated."""
    plan = Plan(runs=4, unchecked=2)
    every = jobs(plan, {})
    assert len(every) == (plan.runs + plan.unchecked) * len(KINDS)
    for block in range(plan.runs):
        assert sorted(name for at, name, checked in every if at == block and checked) == sorted(k.name for k in KINDS)
    remaining = jobs(plan, {("cache", 1): 3, ("cache", 0): 1})
    assert [job for job in remaining if job[1] == "cache"] == [(2, "cache", 0), (3, "cache", 1)]
    assert len(jobs(FULL, {})) == (FULL.runs + FULL.unchecked) * len(KINDS)


def waits_for_lanes() -> bool:
    """Returns whether the main thread has started all lanes, and waits."""
    names, frame = set(), sys._current_frames()[threading.main_thread().ident]
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "in_lanes" in names and "start" not in names and bool(names & {"wait", "join"})


def test_lanes_that_are_interrupted_are_waited_for():
    """Lane 1 interrupts the main thread while that waits; lane 0 ends later. Both end before `in_lanes` raises."""
    stopping, last = threading.Event(), threading.Event()
    ended, notified = [], []

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)

    def lane(index):
        if index == 1:
            deadline = time.monotonic() + 30
            while not waits_for_lanes():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert stopping.wait(30)
        if index == 0:  # lane 0 removes its guests slowly; lane 1 has removed its guests already
            assert last.wait(30)
            time.sleep(0.3)
        ended.append(index)
        if index == 1:
            last.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            in_lanes(2, lane, stopping, lambda: notified.append(sorted(ended)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert notified == [[0, 1]]


def test_the_paper_s_types_are_all_there():
    """The paper's table has 14 types in three classes."""
    assert sum(kind.paper for kind in KINDS) == 14
    assert len({kind.of_class for kind in KINDS if kind.paper}) == 3


def write_invented_rows(tmp_path: Path, wrong: int = 0, unchecked_wrong: int = 7) -> Path:
    """Writes rows: 7 finished checked runs (1 of them without faults), 1 unfinished, 2 unchecked (1 without faults).

    `wrong`: blocks that each checked run with changed code reads wrong; `unchecked_wrong`: each unchecked run.
    """
    compared = {"put": 10, "way": "host", "kept": 100, "overwritten": 0, "dropped": 0, "compared": 8192}

    def row(kind, outcome, *, refused=0, wrong=0, checked=1, block=0, **more):
        counts = {"served": 100 - refused, "refused": refused, "wrong": wrong, **compared}
        key = {"kind": kind, "of_class": "corruption", "checked": checked, "block": block, "seed": block}
        return Row(outcome=outcome, **key, **counts, **more)

    rows = RowFile(tmp_path / "faults-raw.csv", Row)
    for block in range(3):
        rows.append(row("cache", "went on", refused=10, block=block))
        rows.append(row("text", "crashed", refused=5, wrong=wrong, block=block))
    note = "NoAnswerError: port 7007 does not answer"
    rows.append(Row(kind="stack", of_class="corruption", checked=1, block=0, seed=0, note=note))
    rows.append(row("cache", "hung", wrong=unchecked_wrong, checked=0, hit=[3, 4, 9], hit_wrong=2))
    rows.append(row("none", "hung", wrong=unchecked_wrong, checked=0, hit=[], hit_wrong=0))
    rows.close()
    continued = RowFile(rows.path, Row, append=True)
    continued.append(row("none", "went on"))
    continued.close()
    return rows.path


def test_figures_count_wrong_blocks_with_and_without_the_check(tmp_path):
    """Runs without faults (type `none`) are not in the figures."""
    frame = read(write_invented_rows(tmp_path))
    figures = {figure.id: figure for figure in analysis.figures(frame, "raw").figures}
    ours, unchecked = figures["blocks_wrong"], figures["blocks_wrong_unchecked"]
    assert (ours.value, ours.n, ours.met) == (0, 3 + 3, True)  # of the types `cache` and `text`
    assert ours.extra["refused"] == 3 * 10 + 3 * 5
    assert ours.extra["runs_unfinished"] == 1
    assert (unchecked.value, unchecked.n, unchecked.met) == (7, 1, True), "without the control"
    assert (unchecked.extra["hit"], unchecked.extra["hit_wrong"]) == (3, 2)
    lines = {line["type"]: line for line in analysis.by_kind(frame, 1)}
    assert (lines["stack"]["n"], lines["stack"]["unfinished"]) == (0, 1)
    assert lines["text"]["crashed"] == 3
    assert [(line["outcome"], line["n"]) for line in analysis.by_outcome(frame, 1)] == [("crashed", 3), ("went on", 4)]
    assert plots.draw(frame, tmp_path) == ["faults-figure15.png"]


def test_wrong_blocks_and_an_experiment_that_cannot_fail_miss_their_bars(tmp_path):
    """The control must read wrong blocks: otherwise the experiment shows nothing."""
    findings = analysis.figures(read(write_invented_rows(tmp_path, wrong=1, unchecked_wrong=0)), "raw")
    assert [(figure.id, figure.met) for figure in findings.figures] == [
        ("blocks_wrong", False),
        ("blocks_wrong_unchecked", False),
    ]
    json.dumps([figure.as_json() for figure in findings.figures])


def test_complaints_of_a_kernel_are_detected():
    """The second line is printed by every guest."""
    assert complaints("[    4.1] BUG: unable to handle page fault for address: ffff\n")
    assert not complaints("rekindle-micro ready\n")
