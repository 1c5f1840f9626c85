"""The tiers of one engine: what is where, what goes and what comes back.

All bookkeeping is done on the engine's thread, in the calls that the scheduler makes while it
plans; the disk's threads (``disk_io``) are given slots of host memory and give them back. A block
enters the host when the pool evicts it and stays there when it is restored, so that evicting it
again copies nothing. Blocks used longest ago leave first, a prefix's last before its first. What
leaves the host is on the disk by then, if there is one and it was fast enough; else it is dropped,
and computed when somebody asks for it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tokenpath.engine.kv_tiers.arena import Arena, Bytes
from tokenpath.engine.kv_tiers.disk_io import DiskIo, Loaded, Read, Write, Written
from tokenpath.engine.kv_tiers.folder import BlockFolder
from tokenpath.engine.kv_tiers.sealed import HEADER_BYTES, DamagedBlockError, checksum
from tokenpath.policy.tiers import BlockName, Costs, Place, Rate
from tokenpath.protocol.replica import ReplicaStats

LONGEST_READ_S = 5.0
"""A sequence waits no longer for the disk where it is not known what computing takes."""
_WRITE_BEHIND = 0.5
"""Part of the host's slots that may be free before blocks are written for the next ones to fit."""
_MOST_WRITES = 64
"""Blocks that may wait to be written, whose slots cannot be used meanwhile. About two steps of a
prompt evict as many."""
_SHORTEST_PREFILL = 32
"""Tokens of chunks in a step that say how fast prompts are computed; fewer are mostly overhead."""
log = logging.getLogger(__name__)


class Copier(Protocol):
    """The pool's side; see ``copier.BlockCopier``."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, block: int, to: Bytes) -> None: ...

    def write(self, block: int, source: Bytes) -> None: ...


@dataclass(slots=True)
class _Counts:
    """Blocks since the start; ``ReplicaStats`` says of what."""

    saved: int = 0
    restored: int = 0
    disk_hits: int = 0
    corrupt: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """A block in a slot of the host."""

    name: BlockName
    slot: int
    checksum: bytes
    writing: bool = False
    """A thread reads the slot."""


class _Transfer:
    """Blocks that somebody waits for."""

    def __init__(
        self, collect: Callable[[], None], clock: Callable[[], float], deadline: float
    ) -> None:
        self.remaining = 0
        self._collect = collect
        self._clock = clock
        self._deadline = deadline

    @property
    def done(self) -> bool:
        self._collect()
        return self.remaining == 0 or self._clock() >= self._deadline


class KvTiers:
    """Host memory and, with a folder, a disk behind one pool. A ``policy.tiers.Tiers``.

    Not thread-safe: every call comes from the engine's thread.
    """

    def __init__(
        self,
        copier: Copier,
        *,
        block_tokens: int,
        host_bytes: int,
        step_bytes: int,
        disk_bytes: int = 0,
        folder: BlockFolder | None = None,
        fingerprint: bytes = b"",
        survive_restarts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``step_bytes`` may be restored between two steps.

        ``folder`` is the disk's, which is closed with the tiers. What is in it counts only where
        blocks ``survive_restarts``; then each is written as soon as it is in the host.

        Raises ``OSError`` if the folder cannot be read.
        """
        size = copier.block_bytes
        self._copier = copier
        self._block_tokens = block_tokens
        self._clock = clock
        self._step_blocks = max(1, step_bytes // size)
        self._survive = survive_restarts
        self._arena = Arena(size, max(1, host_bytes // size))
        self._host: OrderedDict[bytes, _Held] = OrderedDict()
        self._leaving: list[_Held] = []
        """Gone from the host, but a thread still reads their slots."""
        self._pinned: set[bytes] = set()
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._disk: OrderedDict[bytes, None] = OrderedDict()
        self._disk_most = disk_bytes // (size + HEADER_BYTES) if folder is not None else 0
        self._reading: dict[bytes, list[_Transfer]] = {}
        self._counts = _Counts()
        self._host_rate, self._disk_rate, self._prefill_rate = Rate(), Rate(), Rate()
        self._folder = folder
        self._io: DiskIo | None = None
        if folder is not None:
            self._begin_disk(folder, fingerprint)

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self._copier.block_bytes

    # What the scheduler asks.

    def save(self, name: BlockName, block: int) -> None:
        self._collect()
        held = self._host.get(name.identity)
        if held is not None:
            self._host.move_to_end(name.identity)
            return
        if name.identity in self._disk:
            self._disk.move_to_end(name.identity)
            return
        if name.identity in self._reading:
            return
        slot = self._free_slot()
        if slot is None:
            self._counts.dropped += 1
            return
        row = self._arena.row(slot)
        self._copier.read(block, row)
        self._host[name.identity] = _Held(name, slot, checksum(row.data))
        self._counts.saved += 1
        if self._io is not None:
            self._unwritten[name.identity] = None
            self._write_behind()

    def find(self, names: Sequence[BlockName]) -> list[Place]:
        self._collect()
        places: list[Place] = []
        for name in names:
            place = self._place(name)
            if place is None:
                break
            places.append(place)
        # The last are the first to leave: a prefix is useful without its tail.
        for name in reversed(names[: len(places)]):
            for tier in (self._host, self._disk):
                if name.identity in tier:
                    tier.move_to_end(name.identity)
        return places

    def bring(self, names: Sequence[BlockName]) -> _Transfer:
        # More than the host has slots for would push itself out.
        names = names[: self._arena.slots]
        compute_s = self._prefill_rate.seconds_for(len(names) * self._block_tokens)
        patience = LONGEST_READ_S if compute_s is None else compute_s
        transfer = _Transfer(self._collect, self._clock, self._clock() + patience)
        for name in names:
            waiting = self._reading.get(name.identity)
            if waiting is None:
                if name.identity in self._host:
                    continue
                if name.identity not in self._disk or self._io is None:
                    break
                slot = self._free_slot()
                if slot is None:
                    break
                waiting = self._reading[name.identity] = []
                self._io.read(Read(name, slot, self._arena.row(slot)))
            waiting.append(transfer)
            transfer.remaining += 1
        return transfer

    def pin(self, names: Sequence[BlockName]) -> None:
        self._pinned.update(name.identity for name in names)

    def unpin(self, names: Sequence[BlockName]) -> None:
        self._pinned.difference_update(name.identity for name in names)

    def restore(self, names: Sequence[BlockName], blocks: Sequence[int]) -> int:
        self._collect()
        started, count = self._clock(), 0
        for name, block in zip(names, blocks, strict=True):
            held = self._host.get(name.identity)
            if held is None or held.name != name:
                break
            row = self._arena.row(held.slot)
            if checksum(row.data) != held.checksum:
                self._corrupt("host memory", DamagedBlockError("its checksum is wrong"))
                self._remove(held)
                break
            self._copier.write(block, row)
            count += 1
        self._host_rate.observe(count, self._clock() - started)
        self._counts.restored += count
        return count

    def costs(self) -> Costs:
        reading = 0 if self._io is None else self._io.reading
        return Costs(
            compute_s=self._prefill_rate.seconds_for(self._block_tokens),
            host_s=self._host_rate.seconds_for(1) or 0.0,
            disk_s=self._disk_rate.seconds_for(1) or 0.0,
            backlog_s=self._disk_rate.seconds_for(reading) or 0.0,
        )

    def declined(self) -> None:
        self._host_rate.doubt()
        self._disk_rate.doubt()

    def step_blocks(self) -> int:
        return self._step_blocks

    # What the engine says and asks.

    def computed(self, prefill_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so much time."""
        if prefill_tokens >= _SHORTEST_PREFILL:
            self._prefill_rate.observe(prefill_tokens, seconds)

    def wait(self, timeout_s: float) -> None:
        """Wait for a block that was asked for, if any was."""
        if self._io is not None and self._io.reading:
            self._io.wait(timeout_s)

    def report(self, stats: ReplicaStats) -> ReplicaStats:
        """An engine's figures, with the tiers' among them."""
        self._collect()
        counts, size = self._counts, self._copier.block_bytes
        return msgspec.structs.replace(
            stats,
            kv_host_blocks=len(self._host),
            kv_host_bytes=len(self._host) * size,
            kv_disk_blocks=len(self._disk),
            kv_disk_bytes=len(self._disk) * (size + HEADER_BYTES),
            kv_saved_blocks_total=counts.saved,
            kv_restored_blocks_total=counts.restored,
            kv_restored_tokens_total=counts.restored * self._block_tokens,
            kv_disk_hits_total=counts.disk_hits,
            kv_corrupt_blocks_total=counts.corrupt,
            kv_dropped_blocks_total=counts.dropped,
        )

    def close(
        self,
        kept: Iterable[tuple[BlockName, int]] = (),
        *,
        keep: bool = True,
        within_s: float = 2.0,
    ) -> None:
        """Stop, without waiting for a disk that does not answer.

        Where blocks survive, ``kept`` (names and blocks of the pool) and what the host holds are
        written first, as far as the time suffices. Without ``keep`` no block survives this end.
        """
        deadline = self._clock() + within_s
        io = self._io
        survive = self._survive and keep
        if io is not None and survive:
            for name, block in kept:
                if self._clock() >= deadline:
                    break
                self.save(name, block)
            while self._clock() < deadline:
                self._collect()
                self._write_behind()
                if not io.writing:
                    break
                io.wait(deadline - self._clock())
        self._io = None
        if io is not None:
            io.close(max(0.1, deadline - self._clock()))
        if self._folder is not None:
            self._folder.close(keep=survive)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self._collect()
        reading = 0 if self._io is None else self._io.reading
        held = [*self._host.values(), *self._leaving]
        taken = [entry.slot for entry in held]
        assert len(taken) + reading + self._arena.free == self._arena.slots, (
            "slots are neither free, nor held, nor being read into"
        )
        if not reading:
            self._arena.check_integrity(taken)
        for identity, entry in self._host.items():
            assert entry.name.identity == identity, "a block is held under another's name"
        assert not self._reading.keys() & self._host.keys(), "a block is read that is held"
        assert set(self._unwritten) <= set(self._host), "a block to be written is not held"
        assert len(self._disk) <= self._disk_most, "the disk holds more than it may"

    # Bookkeeping.

    def _place(self, name: BlockName) -> Place | None:
        held = self._host.get(name.identity)
        if held is not None:
            return "host" if held.name == name else None
        return "disk" if name.identity in self._disk else None

    def _free_slot(self) -> int | None:
        """A slot, at the cost of the block used longest ago; None if all are needed."""
        slot = self._arena.take()
        if slot is not None:
            return slot
        movable = (
            held
            for held in self._host.values()
            if not held.writing and held.name.identity not in self._pinned
        )
        victim = next(movable, None)
        if victim is None:
            return None
        if victim.name.identity not in self._disk:
            self._counts.dropped += 1
        self._remove(victim)
        return self._arena.take()

    def _remove(self, held: _Held) -> None:
        del self._host[held.name.identity]
        self._unwritten.pop(held.name.identity, None)
        if held.writing:
            self._leaving.append(held)
        else:
            self._arena.give(held.slot)

    def _corrupt(self, where: str, error: DamagedBlockError) -> None:
        self._counts.corrupt += 1
        log.warning("a KV block in %s is damaged (%s); it is computed again", where, error)

    # The disk.

    def _begin_disk(self, folder: BlockFolder, fingerprint: bytes) -> None:
        if self._survive:
            size = self._copier.block_bytes + HEADER_BYTES
            found = folder.blocks(size)
            for block in found[: max(0, len(found) - self._disk_most)]:
                block.path.unlink(missing_ok=True)
            for block in found[-self._disk_most :] if self._disk_most else []:
                self._disk[block.identity] = None
        else:
            folder.clear()
        self._io = DiskIo(
            folder,
            fingerprint=fingerprint,
            most_writes=max(1, min(_MOST_WRITES, self._arena.slots // 2)),
            clock=self._clock,
        )

    def _write_behind(self) -> None:
        """Have the oldest blocks written while there is room, so that they can leave later."""
        io = self._io
        if io is None:
            return
        few_free = self._arena.free < self._arena.slots * _WRITE_BEHIND
        while self._unwritten and (self._survive or few_free) and self._disk_most:
            held = self._host[next(iter(self._unwritten))]
            full = len(self._disk) + io.writing - self._disk_most + 1
            victims = self._disk_victims(full)
            if len(victims) < full:
                return
            row = self._arena.row(held.slot)
            if not io.write(Write(held.name, held.slot, row, held.checksum, victims)):
                return
            for victim in victims:
                del self._disk[victim]
                if victim not in self._host:
                    self._counts.dropped += 1
            del self._unwritten[held.name.identity]
            held.writing = True

    def _disk_victims(self, count: int) -> list[bytes]:
        """Blocks used longest ago, but none that is being read."""
        victims: list[bytes] = []
        for identity in self._disk:
            if len(victims) >= count:
                break
            if identity not in self._reading:
                victims.append(identity)
        return victims

    def _collect(self) -> None:
        """Take over what the disk's threads have finished."""
        if self._io is None:
            return
        done = self._io.collect()
        for result in done:
            if isinstance(result, Written):
                self._written(result)
            else:
                self._loaded(result)
        if done:
            self._write_behind()

    def _written(self, result: Written) -> None:
        identity = result.job.name.identity
        held = self._host.get(identity)
        if held is None or held.slot != result.job.slot or not held.writing:
            held = next(entry for entry in self._leaving if entry.slot == result.job.slot)
            self._leaving.remove(held)
            self._arena.give(held.slot)
        held.writing = False
        if result.error is not None:
            self._turn_off(result.error)
            return
        if self._disk_most:
            self._disk[identity] = None

    def _loaded(self, result: Loaded) -> None:
        name, slot = result.job.name, result.job.slot
        for transfer in self._reading.pop(name.identity):
            transfer.remaining -= 1
        error = result.error
        if error is None:
            self._host[name.identity] = _Held(name, slot, result.checksum)
            self._disk_rate.observe(1, result.seconds)
            self._counts.disk_hits += 1
            return
        self._arena.give(slot)
        self._disk.pop(name.identity, None)
        if isinstance(error, DamagedBlockError):
            self._corrupt("a file", error)
        elif not isinstance(error, FileNotFoundError):  # deleting files is allowed
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        """Do without the disk from now on."""
        if not self._disk_most:
            return
        where = "" if self._folder is None else f" in {self._folder.path}"
        log.warning("KV blocks are not kept on the disk%s any more: %s", where, error.strerror)
        self._disk_most = 0
        self._disk.clear()
        self._unwritten.clear()
