"""A guest's memory from outside: writes faults into the RAM file while the guest runs.

A *frame* is a page of physical memory, given by its number. `cached` maps each frame of the guest's page cache that
holds a block of the disk to the number of that block.
"""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
_WRITABLE = 2
"""Flag VIRTQ_DESC_F_WRITE."""
_AHEAD = 4
"""Distance from the card's next buffer to the first buffer that is changed, since nearer ones may be in use."""


class Ram:
    """A guest's RAM file. Physical addresses are offsets into it: the guest has less than 2 GiB."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r+")

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self._bytes) // PAGE

    def read(self, address: int, length: int) -> bytes:
        """Reads bytes."""
        return self._bytes[address : address + length].tobytes()

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes; drops those beyond the end of memory."""
        end = min(address + len(data), len(self._bytes))
        self._bytes[address:end] = np.frombuffer(data[: end - address], dtype=np.uint8)

    def flip(self, address: int, bit: int) -> None:
        """Flips a bit of a byte."""
        self._bytes[address] ^= 1 << bit

    def cached(self, image: np.ndarray) -> dict[int, int]:
        """Returns the frames that hold disk blocks, each with its block. `image`: a row of uint64 for each block."""
        words = self._bytes[: self.frames * PAGE].view(np.uint64).reshape(self.frames, PAGE // 8)
        # For each frame, the block whose first word is the same or else the next larger one; then compare whole frames.
        order = np.argsort(image[:, 0])
        positions = np.searchsorted(image[order, 0], words[:, 0])
        block = order[np.minimum(positions, len(order) - 1)]
        candidates = np.nonzero(image[block, 0] == words[:, 0])[0]
        return {
            int(frame): int(block[frame]) for frame in candidates if np.array_equal(words[frame], image[block[frame]])
        }

    def flip_cached(self, cached: dict[int, int], count: int, rng: random.Random) -> list[int]:
        """Flips a bit in each of `count` frames; returns these frames."""
        frames = rng.sample(sorted(cached), min(count, len(cached)))
        for frame in frames:
            self.flip(frame * PAGE + rng.randrange(PAGE), rng.randrange(8))
        return frames

    def overrun_cached(self, cached: dict[int, int], count: int, rng: random.Random) -> list[list[int]]:
        """Simulates copies that overrun page-cache frames by up to four pages; returns the overrun frames, by copy."""
        overrun_frames = []
        for frame in rng.sample(sorted(cached), min(count, len(cached))):
            data = rng.randbytes(rng.randint(1, 4 * PAGE))
            self.write((frame + 1) * PAGE, data)
            overrun_frames.append([frame + 1 + n for n in range((len(data) + PAGE - 1) // PAGE)])
        return overrun_frames

    def flip_stacks(self, stacks: str, count: int, rng: random.Random) -> int:
        """Flips bits in used kernel stacks; returns how many.

        `stacks`: the list from the guest's module, a line `TASK START LENGTH` for each piece (hexadecimal, physical).
        """
        by_task: dict[str, list[tuple[int, int]]] = {}
        for line in stacks.splitlines():
            task, start, length = line.split()
            by_task.setdefault(task, []).append((int(start, 16), int(length, 16)))
        for _ in range(count if by_task else 0):
            parts = by_task[rng.choice(list(by_task))]
            offset = rng.randrange(sum(length for _, length in parts))
            for start, length in parts:
                if offset < length:
                    self.flip(start + offset, rng.randrange(8))
                    break
                offset -= length
        return count if by_task else 0

    def give_to_card(self, queue: dict[str, Any], cached: dict[int, int], count: int, rng: random.Random) -> list[int]:
        """Replaces buffers of the card's driver by page-cache frames, so that the card writes packets to them.

        Returns the frames. `queue`: the receive queue, as QMP `x-query-virtio-queue-status` describes it (split ring).
        """
        # Layout of a split virtqueue: virtio specification, section 2.7.
        size, next_index = int(queue["vring-num"]), int(queue["last-avail-idx"])
        descriptors, ring = int(queue["vring-desc"]), int(queue["vring-avail"])
        (end_index,) = struct.unpack("<H", self.read(ring + 2, 2))
        frames = sorted(cached)
        given_frames: list[int] = []
        for index in range(next_index + _AHEAD, next_index + ((end_index - next_index) & 0xFFFF)):
            if len(given_frames) == count or not frames:
                break
            (head,) = struct.unpack("<H", self.read(ring + 4 + 2 * (index % size), 2))
            descriptor = descriptors + 16 * (head % size)
            _, length, flags, _ = struct.unpack("<QIHH", self.read(descriptor, 16))
            if flags & _WRITABLE and length <= PAGE:
                frame = frames.pop(rng.randrange(len(frames)))
                self.write(descriptor, struct.pack("<Q", frame * PAGE))
                given_frames.append(frame)
        return given_frames

    def close(self) -> None:
        """Unmaps the file."""
        del self._bytes
