"""From a sitting's journal to a page of Markdown, and to the same as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.peers.child import LOAD, MEMORY
from bench.peers.http.drive import METRICS, OUTPUT_RATE
from bench.peers.table import NOTHING, Results, table

ALL_METRICS = (LOAD, *METRICS, MEMORY)
"""Every value of a turn, in the order of the data."""
_GROUPED = 1.05
"""Above so many tokens an event, gaps are not between tokens."""


def markdown(results: Results, *, heading: str, unavailable: Mapping[str, str]) -> str:
    """The ratio, every server's medians, and what went wrong."""
    best = results.compare(OUTPUT_RATE)
    ratio = [["", "server", "output tokens/s"]]
    ratio.append(["best peer", best.best_peer or NOTHING, _text(best.best_peer_rate)])
    ratio.append(["tokenpath's best", best.best_ours or NOTHING, _text(_ours(results))])
    ratio.append(["ratio", "", _text(best.ratio, 2)])
    rows = [
        ["server", "output tokens/s", "requests/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms",
         "tokens an event", "ready after, s", "peak memory, MB", "rounds"],
    ]  # fmt: skip
    for contender in results.contenders:
        found = {name: results.cell(contender.name, name).median for name in ALL_METRICS}
        cell = results.cell(contender.name, OUTPUT_RATE)
        failed = f" ({len(cell.errors)} failed)" if cell.errors else ""
        rows.append(
            [
                contender.name,
                _text(found[OUTPUT_RATE]),
                _text(found["requests_per_s"], 3),
                f"{_ms(found['ttft_p50_s'])} / {_ms(found['ttft_p99_s'])}",
                f"{_ms(found['itl_p50_s'])} / {_ms(found['itl_p99_s'])}",
                _text(found["tokens_per_event"], 2),
                _text(found[LOAD]),
                _text(found[MEMORY], 0, unit=1e6),
                f"{len(cell.values)}{failed}",
            ]
        )
    parts = [heading, table(ratio), table(rows)]
    failures = [f"- {name}: {reason}" for name, reason in unavailable.items()]
    for contender in results.contenders:
        errors = results.cell(contender.name, OUTPUT_RATE).errors
        failures += [f"- {contender.name}: {error}" for error in dict.fromkeys(errors)]
    if failures:
        parts.append("No result:\n\n" + "\n".join(failures))
    if any(
        (results.cell(contender.name, "tokens_per_event").median or 0) > _GROUPED
        for contender in results.contenders
    ):
        parts.append("Where an event carries several tokens, ITL is between groups of them.")
    return "\n\n".join(parts) + "\n"


def document(
    results: Results, *, sitting: Mapping[str, Any], unavailable: Mapping[str, str]
) -> dict[str, Any]:
    """The same as data: the comparison, and every server's medians and rounds."""
    best = results.compare(OUTPUT_RATE)
    return {
        "sitting": dict(sitting),
        "best_peer": best.best_peer,
        "best_ours": best.best_ours,
        "ratio": best.ratio,
        "servers": {
            contender.name: {
                name: {
                    "median": cell.median,
                    "rounds": list(cell.values),
                    "errors": list(cell.errors),
                }
                for name in ALL_METRICS
                for cell in (results.cell(contender.name, name),)
            }
            for contender in results.contenders
        },
        "unavailable": dict(unavailable),
    }


def _ms(seconds: float | None) -> str:
    return _text(seconds, 0, unit=1e-3)


def _ours(results: Results) -> float | None:
    name = results.compare(OUTPUT_RATE).best_ours
    return None if name is None else results.cell(name, OUTPUT_RATE).median


def _text(value: float | None, digits: int = 1, *, unit: float = 1.0) -> str:
    return NOTHING if value is None else f"{value / unit:,.{digits}f}"
