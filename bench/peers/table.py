"""From the journal's entries to medians, ratios and a page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.child import LOAD, MEMORY, PERPLEXITY
from bench.peers.journal import Entry
from bench.peers.rivals import Entrant

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender's figures for one work over the rounds."""

    values: tuple[float, ...]
    errors: tuple[str, ...]

    @property
    def median(self) -> float | None:
        """None if no round gave a figure."""
        return statistics.median(self.values) if self.values else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row: the best of each side, and how they compare."""

    best_peer: str | None
    best_peer_rate: float | None
    best_ours: str | None
    ratio: float | None
    """The best of tokenpath's medians over the best of the peers'."""


class Results:
    """A sitting's entries, by contender and work."""

    def __init__(self, entries: Iterable[Entry], contenders: Sequence[Entrant]) -> None:
        self.contenders = list(contenders)
        self.ours = {contender.name for contender in contenders if contender.ours}
        found: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            found.setdefault((entry.contender, entry.work), []).append(entry)
        self._cells = {
            key: Cell(
                tuple(entry.value for entry in group if entry.value is not None),
                tuple(entry.error for entry in group if entry.error is not None),
            )
            for key, group in found.items()
        }

    def cell(self, contender: str, work: str) -> Cell:
        """Empty if it was never asked."""
        return self._cells.get((contender, work), Cell((), ()))

    def compare(self, work: str) -> Comparison:
        """The row of a work."""
        medians = {
            contender.name: median
            for contender in self.contenders
            if (median := self.cell(contender.name, work).median) is not None
        }
        peer = max(medians.keys() - self.ours, key=medians.__getitem__, default=None)
        own = max(medians.keys() & self.ours, key=medians.__getitem__, default=None)
        return Comparison(
            best_peer=peer,
            best_peer_rate=None if peer is None else medians[peer],
            best_ours=own,
            ratio=None if peer is None or own is None else medians[own] / medians[peer],
        )


def markdown(
    results: Results, works: Sequence[str], *, unavailable: Mapping[str, str], heading: str
) -> str:
    """The whole page: ratios, every contender's medians, quality and memory, what went wrong."""
    own = [contender.name for contender in results.contenders if contender.ours]
    ratios = [["work", "best peer", "its tokens/s", *own, "ratio"]]
    for work in works:
        row = results.compare(work)
        ratios.append(
            [
                work,
                row.best_peer or NOTHING,
                _number(row.best_peer_rate),
                *(_number(results.cell(name, work).median) for name in own),
                NOTHING if row.ratio is None else f"{row.ratio:.2f}",
            ]
        )
    every = [["tokens/s", *works]]
    beside = [["contender", "perplexity", "peak memory, MB", "load, s"]]
    for contender in results.contenders:
        name = contender.name
        every.append([name, *(_cell(results.cell(name, work)) for work in works)])
        memory = results.cell(name, MEMORY).values
        beside.append(
            [
                name,
                _number(results.cell(name, PERPLEXITY).median, 4),
                _number(max(memory) / 1e6 if memory else None, 0),
                _number(results.cell(name, LOAD).median),
            ]
        )
    parts = [heading, table(ratios), table(every), table(beside)]
    failures = [
        *(f"- {name}: {reason}" for name, reason in unavailable.items()),
        *_failures(results, works),
    ]
    if failures:
        parts.append("No result:\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def document(
    results: Results, works: Sequence[str], *, unavailable: Mapping[str, str]
) -> dict[str, Any]:
    """The same as data: per work the comparison, every contender's median and its rounds."""
    found: dict[str, Any] = {"works": {}, "contenders": {}, "unavailable": dict(unavailable)}
    for work in works:
        row = results.compare(work)
        found["works"][work] = {
            "best_peer": row.best_peer,
            "best_peer_tokens_per_s": row.best_peer_rate,
            "best_ours": row.best_ours,
            "ratio": row.ratio,
        }
    for contender in results.contenders:
        own = {"perplexity": results.cell(contender.name, PERPLEXITY).median}
        for name in (LOAD, MEMORY):
            own[name] = results.cell(contender.name, name).median
        found["contenders"][contender.name] = own | {
            work: {
                "median": cell.median,
                "rounds": list(cell.values),
                "errors": list(cell.errors),
            }
            for work in works
            for cell in (results.cell(contender.name, work),)
        }
    return found


def _failures(results: Results, works: Sequence[str]) -> Iterable[str]:
    for contender in results.contenders:
        reasons: dict[str, list[str]] = {}
        for work in (*works, PERPLEXITY):
            for error in results.cell(contender.name, work).errors:
                reasons.setdefault(error, []).append(work)
        for reason, failed in reasons.items():
            yield f"- {contender.name}, {', '.join(dict.fromkeys(failed))}: {reason}"


def _cell(cell: Cell) -> str:
    if cell.median is None:
        return "failed" if cell.errors else NOTHING
    some = f" ({len(cell.errors)} failed)" if cell.errors else ""
    return f"{cell.median:,.1f}{some}"


def _number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the head, as Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
