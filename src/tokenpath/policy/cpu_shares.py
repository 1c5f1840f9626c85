"""Which CPUs each engine of a machine computes on, so that they do not fight over them.

An engine's threads meet at a barrier after every operation: one that has to wait for its CPU holds
up all the others. So each engine gets CPUs of its own, and no more threads than they can run. Of a
core's hardware threads one is enough, since the kernels leave no unit idle for a second; and a
share stays within one NUMA node where it can, for its memory is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical CPU, as the system numbers it."""

    number: int
    core: int
    """CPUs of equal core share its execution units (SMT siblings)."""
    node: int
    """The NUMA node whose memory is nearest."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one engine gets."""

    threads: int
    """Compute threads."""
    cpus: tuple[int, ...]
    """Where the engine's process may run, ascending."""


@dataclass(frozen=True, slots=True)
class Division:
    """What all engines get, in the order in which they were asked for."""

    shares: tuple[Share, ...]
    capacity: int
    """Threads that can run at the same time."""

    @property
    def threads(self) -> int:
        """Of all engines together."""
        return sum(share.threads for share in self.shares)

    @property
    def oversubscribed(self) -> bool:
        """Whether engines will take each other's time."""
        return self.threads > self.capacity


Unit = tuple[int, ...]
"""CPUs that go to one engine together: a core's, or a single one."""


def divide(
    cpus: Sequence[Cpu], wanted: Sequence[int | None], *, limit: int, leave_rest: bool = False
) -> Division:
    """Share CPUs among engines of which each wants so many threads, or None: its part of the rest.

    ``limit`` is how many CPUs' worth of time there is, at least 1; a container may have less than
    it has CPUs. Shares are disjoint, and together all of ``cpus``; with ``leave_rest`` CPUs that
    nobody asked for are left to others. Whole cores are given out while there are enough. A share
    spans NUMA nodes only if it is larger than what any node has left (with the best placing of all
    that were asked for by number), or if there are fewer engines than nodes.

    If not even the least that was asked for fits, all engines may run everywhere: the kernel
    then shares time more fairly than any fixed choice.
    """
    capacity = min(limit, len(cpus))
    least = sum(1 if threads is None else threads for threads in wanted)
    if least > capacity:
        everywhere = tuple(sorted(cpu.number for cpu in cpus))
        return Division(tuple(Share(threads or 1, everywhere) for threads in wanted), capacity)
    room = _rooms(cpus, least)
    numbered = [index for index, threads in enumerate(wanted) if threads is not None]
    automatic = [index for index, threads in enumerate(wanted) if threads is None]
    sizes = [wanted[index] or 0 for index in numbered]
    if numbered and not automatic and not leave_rest:
        sizes = _apportion(sum(map(len, room)), weights=sizes, least=sizes)
    given = dict(zip(numbered, _take_numbered(sizes, room), strict=True))
    given |= zip(automatic, _take_rest(len(automatic), room), strict=True)
    threads = _threads(wanted, given, capacity)
    return Division(
        tuple(
            Share(threads[index], tuple(sorted(number for unit in given[index] for number in unit)))
            for index in range(len(wanted))
        ),
        capacity,
    )


def _rooms(cpus: Sequence[Cpu], least: int) -> list[list[Unit]]:
    """The units of each node, from which shares are taken."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.number):
        cores.setdefault((cpu.node, cpu.core), []).append(cpu.number)
    nodes: dict[int, list[Unit]] = {node: [] for node in sorted({cpu.node for cpu in cpus})}
    for (node, _), numbers in cores.items():
        whole = least <= len(cores)
        nodes[node] += [tuple(numbers)] if whole else [(number,) for number in numbers]
    return list(nodes.values())


def _take_numbered(sizes: Sequence[int], room: list[list[Unit]]) -> list[list[Unit]]:
    """Shares of exactly these sizes, as few of them as possible across nodes."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    ordered = [sizes[index] for index in order]
    places: list[int | None] | None = None
    spanning = 0
    while places is None:
        places = _placed(ordered, [len(units) for units in room], spanning, set())
        spanning += 1
    taken: dict[int, list[Unit]] = {}
    for index, place in zip(order, places, strict=True):
        if place is not None:
            taken[index] = _pop(room[place], sizes[index])
    for index, place in zip(order, places, strict=True):
        if place is None:
            taken[index] = []
            while len(taken[index]) < sizes[index]:
                roomiest = max(room, key=len)
                taken[index] += _pop(roomiest, sizes[index] - len(taken[index]))
    return [taken[index] for index in range(len(sizes))]


def _placed(
    sizes: Sequence[int],
    free: list[int],
    spanning: int,
    hopeless: set[tuple[int, int, tuple[int, ...]]],
) -> list[int | None] | None:
    """A node for each size, or None for at most ``spanning`` of them; None if that is impossible.

    ``hopeless`` remembers what was tried in vain.
    """
    if not sizes:
        return []
    state = (len(sizes), spanning, tuple(sorted(free)))
    if state in hopeless:
        return None
    # The tightest first: what stays free should stay in one piece.
    for node in sorted(range(len(free)), key=free.__getitem__):
        if free[node] >= sizes[0]:
            less = [*free[:node], free[node] - sizes[0], *free[node + 1 :]]
            rest = _placed(sizes[1:], less, spanning, hopeless)
            if rest is not None:
                return [node, *rest]
    if spanning:
        rest = _placed(sizes[1:], free, spanning - 1, hopeless)
        if rest is not None:
            return [None, *rest]
    hopeless.add(state)
    return None


def _take_rest(count: int, room: list[list[Unit]]) -> list[list[Unit]]:
    """Everything that is left, in ``count`` shares as equal as nodes allow."""
    nodes = [units for units in room if units]
    if not count:
        return []
    if count < len(nodes):
        shares: list[list[Unit]] = [[] for _ in range(count)]
        for units in sorted(nodes, key=len, reverse=True):
            min(shares, key=len).extend(_pop(units, len(units)))
        return shares
    tenants = _apportion(count, weights=[len(units) for units in nodes], least=[1] * len(nodes))
    return [
        _pop(units, size)
        for units, its in zip(nodes, tenants, strict=True)
        for size in _apportion(len(units), weights=[1] * its, least=[1] * its)
    ]


def _threads(
    wanted: Sequence[int | None], given: dict[int, list[Unit]], capacity: int
) -> dict[int, int]:
    """How many threads each share gets: as wanted, or one for each of its units."""
    threads = {index: number for index, number in enumerate(wanted) if number is not None}
    automatic = [index for index, number in enumerate(wanted) if number is None]
    spare = capacity - sum(threads.values())
    sizes = [len(given[index]) for index in automatic]
    if sizes:
        most = min(spare, sum(sizes))
        threads |= zip(
            automatic,
            _apportion(most, weights=sizes, least=[1] * len(sizes)),
            strict=True,
        )
        spare -= most
    for index in automatic:
        if len(given[index]) == 1:
            # Alone on a core, its second hardware thread is better than none.
            more = min(spare, len(given[index][0]) - 1)
            threads[index] += more
            spare -= more
    return threads


def _apportion(total: int, *, weights: Sequence[int], least: Sequence[int]) -> list[int]:
    """``total`` in whole parts, proportional to ``weights`` but none below ``least``."""
    parts = list(least)
    for _ in range(total - sum(parts)):
        neediest = max(range(len(parts)), key=lambda i: weights[i] / (parts[i] + 1))
        parts[neediest] += 1
    return parts


def _pop(units: list[Unit], count: int) -> list[Unit]:
    """The first ``count`` units, or all if there are fewer, which are then gone."""
    taken = units[:count]
    del units[:count]
    return taken
