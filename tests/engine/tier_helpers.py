"""A pool of plain memory, and names of blocks whose contents are known."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from tokenpath.engine.kv_tiers.folder import open_folder
from tokenpath.engine.kv_tiers.sealed import HEADER_BYTES
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.policy.prefix import block_identity, identity_root
from tokenpath.policy.tiers import BlockName

BLOCK_BYTES = 1000
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
FINGERPRINT = bytes(range(32))


class Pool:
    """A ``Copier`` of blocks whose contents follow from their names."""

    block_bytes = BLOCK_BYTES

    def __init__(self, blocks: int = 64) -> None:
        self.memory = np.zeros((blocks, BLOCK_BYTES), np.uint8)

    def read(self, block, to):
        to[:] = self.memory[block]

    def write(self, block, source):
        self.memory[block] = source

    def fill(self, block: int, name: BlockName) -> None:
        self.memory[block] = contents(name)

    def holds(self, block: int, name: BlockName) -> bool:
        return bool((self.memory[block] == contents(name)).all())


def contents(name: BlockName) -> np.ndarray:
    return np.frombuffer(random.Random(name.identity).randbytes(BLOCK_BYTES), np.uint8)


def chain(count: int, *, salt: str = "", first: int = 0, adapter: str = "") -> list[BlockName]:
    """Names of a prefix's blocks."""
    key = (salt, adapter)
    names, parent = [], identity_root(key)
    for index in range(count):
        token_ids = (first + index, 1)
        identity = block_identity(parent, token_ids)
        names.append(BlockName(identity, parent, token_ids, key))
        parent = identity
    return names


def make_tiers(
    pool: Pool,
    root: Path | None = None,
    *,
    host: int = 8,
    disk: int = 16,
    survive: bool = True,
    fingerprint: bytes = FINGERPRINT,
    step: int = 100,
    clock=time.monotonic,
) -> KvTiers:
    """Tiers of so many blocks."""
    folder = None
    if root is not None:
        folder = open_folder(root, model="some/model", fingerprint=fingerprint)
    return KvTiers(
        pool,
        block_tokens=2,
        host_bytes=host * BLOCK_BYTES,
        step_bytes=step * BLOCK_BYTES,
        disk_bytes=disk * FILE_BYTES,
        folder=folder,
        fingerprint=fingerprint,
        survive_restarts=survive,
        clock=clock,
    )


def save(tiers: KvTiers, pool: Pool, names: list[BlockName]) -> None:
    """Have blocks evicted, a prefix's last first, as the pool does."""
    for name in reversed(names):
        pool.fill(0, name)
        tiers.save(name, 0)
        pool.memory[0] = 0
        tiers.check_integrity()


def settle(tiers: KvTiers) -> None:
    """Wait until the disk's threads have nothing left to do."""
    io = tiers._io
    deadline = time.monotonic() + 10
    while io is not None:
        tiers.check_integrity()
        if not (io.reading or io.writing):
            return
        assert time.monotonic() < deadline, "the disk's threads are stuck"
        io.wait(1)


def fetch(tiers: KvTiers, pool: Pool, names: list[BlockName]) -> int:
    """Restore what can be, right or not at all; returns how many blocks were."""
    found = tiers.find(names)
    if "disk" in found:
        transfer = tiers.bring(names[: len(found)])
        settle(tiers)
        assert transfer.done
    held = [place == "host" for place in tiers.find(names)]
    count = held.index(False) if False in held else len(held)
    blocks = list(range(1, 1 + count))
    restored = tiers.restore(names[:count], blocks)
    tiers.check_integrity()
    for name, block in zip(names[:restored], blocks, strict=False):
        assert pool.holds(block, name), "a block came back with other contents"
    return restored


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))
