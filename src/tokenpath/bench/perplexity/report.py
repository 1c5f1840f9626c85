"""Perplexities as JSON and as a table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenpath.bench.engine.loaded import Subject
from tokenpath.bench.machine import Machine

FORMAT = 1


class PartScore(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the text, or all of it."""

    perplexity: float
    """``exp(nll)``."""
    nll: float
    """Mean negative natural-log probability of a scored token."""
    tokens: int
    """Scored."""
    windows: int


class PerplexityReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, on what, and how."""

    perplexity: float
    nll: float
    tokens: int
    windows: int
    parts: dict[str, PartScore]
    window_tokens: int
    first_token_ids: list[int]
    """What every window begins with: the beginning-of-sequence token, if the model has one."""
    token_ids_sha256: str
    """Of all windows' token ids in order, as little-endian 32-bit numbers: equal texts, equal
    tokenizers and equal windows."""
    seconds: float
    format: int
    date: str
    measured: Subject
    machine: Machine
    versions: dict[str, str]

    def json(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def summarize(scores: Sequence[Sequence[float]]) -> PartScore:
    """Windows' scores as one figure; every token counts the same."""
    tokens = sum(map(len, scores))
    nll = -math.fsum(score for window in scores for score in window) / tokens
    return PartScore(perplexity=math.exp(nll), nll=nll, tokens=tokens, windows=len(scores))


def fingerprint(windows: Iterable[Sequence[int]]) -> str:
    """See ``PerplexityReport.token_ids_sha256``."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(b"".join(token.to_bytes(4, "little") for token in window))
    return digest.hexdigest()


def render(report: PerplexityReport) -> RenderableType:
    """A row for each part and one for all of them."""
    subject = report.measured
    table = Table(
        title=Text(
            f"{subject.model}, {subject.dtype}, KV {subject.kv_dtype}, {subject.kernels} kernels"
        ),
        title_justify="left",
    )
    table.add_column("text")
    for name in ("perplexity", "bits a token", "tokens", "windows"):
        table.add_column(name, justify="right")
    whole = PartScore(
        perplexity=report.perplexity, nll=report.nll, tokens=report.tokens, windows=report.windows
    )
    rows: Mapping[str, PartScore] = {**report.parts, "all": whole}
    for name, score in rows.items():
        table.add_row(
            name,
            f"{score.perplexity:,.4f}",
            f"{score.nll / math.log(2):.4f}",
            f"{score.tokens:,}",
            f"{score.windows:,}",
        )
    how = Text(f"windows of {report.window_tokens} tokens, {report.seconds:.0f} s")
    return Group(table, how)
