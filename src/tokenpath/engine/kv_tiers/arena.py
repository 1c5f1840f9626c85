"""The host tier's memory: one stretch, cut into slots of a block each.

It is taken from the system when it is first written, and never given back: a slot is used again
instead of being allocated again, because touching new pages takes longer than copying a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenpath.engine.kernels.packed import huge_memory

Bytes = npt.NDArray[np.uint8]
_ALIGNED = 64
"""A cache line, so that no two slots share one."""


class Arena:
    """So many slots of so many bytes, each free or taken."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slots = slots
        self._slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // _ALIGNED) * _ALIGNED
        self._memory = huge_memory(self._stride * slots)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot; None if there is none."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Let a slot be taken again."""
        self._free.append(slot)

    def row(self, slot: int) -> Bytes:
        """The memory of a slot [slot_bytes]."""
        start = slot * self._stride
        return self._memory[start : start + self._slot_bytes]

    def check_integrity(self, taken: list[int]) -> None:
        """Raise ``AssertionError`` unless every slot is either free or among ``taken``, once."""
        assert sorted([*taken, *self._free]) == list(range(self.slots)), (
            "a slot of the host tier is lost, or used twice"
        )
