"""Recorded workloads: what real users sent, and when, so that nobody chooses a flattering load.

Two public formats are read. The Azure 2023 LLM inference trace is CSV with the header
``TIMESTAMP,ContextTokens,GeneratedTokens``. The Mooncake trace is JSON lines with ``timestamp``
(milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one id per block of 512 prompt
tokens; equal ids stand for an equal prompt up to the end of that block.

Time may be stretched and lengths divided by one factor each; nothing else is altered.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenpath.protocol.errors import SpecError

BLOCK_TOKENS = 512
"""Prompt tokens that one Mooncake hash id stands for."""

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_COLUMNS = 3

_Parsed = tuple[float, int, int, tuple[int, ...]]
"""A line's (seconds on the trace's own clock, prompt tokens, output tokens, block ids)."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    offset_s: float
    """Seconds since the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Mooncake's hash ids, one per started block of 512 tokens; empty for Azure."""


@dataclass(frozen=True, slots=True)
class ScaledRow:
    """A row after ``--time-scale`` and ``--length-divisor``."""

    offset_s: float
    blocks: tuple[tuple[int | None, int], ...]
    """(block id, tokens) from the prompt's start; id None is content of this request alone."""
    output_tokens: int


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Read a trace file lazily, one row per request.

    Raises ``SpecError``, naming file and line, when the file cannot be read or a line is malformed.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            yield from parse_trace(lines, str(path))
    except OSError as error:
        raise SpecError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"the trace {path} is not UTF-8 text") from error


def parse_trace(lines: Iterable[str], name: str) -> Iterator[TraceRow]:
    """Parse the lines of a trace; the first tells the format. Blank lines are skipped.

    Offsets are relative to the first row and must not decrease. Raises ``SpecError`` with
    ``name`` and the line's number.
    """
    numbered = ((n, line.strip()) for n, line in enumerate(lines, start=1))
    filled: Iterator[tuple[int, str]] = ((n, line) for n, line in numbered if line)
    first = next(filled, None)
    if first is None:
        raise SpecError(f"the trace {name} is empty")
    if first[1].removeprefix("\ufeff") == _AZURE_HEADER:
        parse = _azure
    elif first[1].startswith("{"):
        parse = _mooncake
        filled = itertools.chain((first,), filled)
    else:
        raise SpecError(
            f"{name}, line {first[0]}: neither the header {_AZURE_HEADER} of an Azure trace "
            "nor a JSON object of a Mooncake trace"
        )
    start: float | None = None
    previous = 0.0
    for number, line in filled:
        try:
            at_s, prompt, output, block_ids = parse(line)
        except ValueError as error:
            raise SpecError(f"{name}, line {number}: {error}") from error
        start = at_s if start is None else start
        offset = at_s - start
        if offset < previous:
            raise SpecError(f"{name}, line {number}: its time is before the previous line's")
        previous = offset
        yield TraceRow(offset, prompt, output, block_ids)
    if start is None:
        raise SpecError(f"the trace {name} has a header but no requests")


def scale(row: TraceRow, *, time_scale: float, length_divisor: int) -> ScaledRow:
    """Stretch a row's time by ``time_scale`` and divide its lengths by ``length_divisor``.

    Lengths round up, so none becomes 0. Block boundaries are divided too and rounded down, the same
    for every request, so that requests which shared blocks still do.
    """
    prompt = -(-row.prompt_tokens // length_divisor)
    output = -(-row.output_tokens // length_divisor)
    if not row.block_ids:
        return ScaledRow(row.offset_s * time_scale, ((None, prompt),), output)
    starts = [i * BLOCK_TOKENS // length_divisor for i in range(len(row.block_ids))]
    ends = [*starts[1:], prompt]
    blocks = tuple(
        (block_id, end - begin)
        for block_id, begin, end in zip(row.block_ids, starts, ends, strict=True)
    )
    return ScaledRow(row.offset_s * time_scale, blocks, output)


def _azure(line: str) -> _Parsed:
    cells = line.split(",")
    if len(cells) != _AZURE_COLUMNS:
        raise ValueError(f"{_AZURE_COLUMNS} columns are expected, {len(cells)} found")
    # Seven fractional digits are recorded, one more than datetime holds.
    stamp, _, fraction = cells[0].partition(".")
    try:
        whole = dt.datetime.fromisoformat(stamp).replace(tzinfo=dt.UTC).timestamp()
        at_s = whole + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must look like 2023-11-16 18:17:03.9799600, not {cells[0][:40]!r}"
        ) from None
    prompt = _count(cells[1], "ContextTokens")
    output = _count(cells[2], "GeneratedTokens")
    return at_s, prompt, output, ()


def _mooncake(line: str) -> _Parsed:
    try:
        record = _decode_mooncake(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a Mooncake record: {error}") from None
    prompt = _positive(record.input_length, "input_length")
    output = _positive(record.output_length, "output_length")
    needed = -(-prompt // BLOCK_TOKENS)
    if len(record.hash_ids) != needed:
        raise ValueError(
            f"input_length {prompt} needs {needed} hash_ids of {BLOCK_TOKENS} tokens, "
            f"{len(record.hash_ids)} found"
        )
    if min(record.hash_ids) < 0:
        raise ValueError("hash_ids must not be negative")
    return record.timestamp / 1000, prompt, output, tuple(record.hash_ids)


def _count(text: str, column: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{column} must be a whole number, not {text[:40]!r}") from None
    return _positive(value, column)


def _positive(value: int, field: str) -> int:
    if value < 1:
        raise ValueError(f"{field} must be at least 1, not {value}")
    return value
