"""Retrieval and speed by number type, as JSON and as a table."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenpath.bench.machine import Machine

FORMAT = 1


class DtypeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one number type gives."""

    dtype: str
    recall_at_1: float
    recall_at_10: float
    mean_reciprocal_rank: float
    same_top_10: float
    """Mean part of a question's first ten passages that float32 has among its own."""
    least_cosine: float
    """Between a text's vector and its vector in float32, where they differ most."""
    tokens_per_s: float
    inputs_per_s: float
    weight_bytes: int


class RetrievalReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, on what, and how."""

    results: list[DtypeResult]
    """float32 first."""
    model: str
    architecture: str
    dimensions: int
    passages: int
    tokens: int
    """Of all passages and questions."""
    rounds: int
    """Speeds are medians over so many."""
    threads: int
    max_step_tokens: int
    format: int
    date: str
    machine: Machine
    versions: dict[str, str]

    def json(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def render(report: RetrievalReport) -> RenderableType:
    """A row for each number type."""
    title = f"{report.model}, {report.dimensions} dimensions, {report.passages:,} passages"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("dtype")
    names = ("recall@1", "recall@10", "MRR", "same top 10", "least cosine", "tokens/s", "inputs/s")
    for name in names:
        table.add_column(name, justify="right")
    for each in report.results:
        table.add_row(
            each.dtype,
            f"{each.recall_at_1:.4f}",
            f"{each.recall_at_10:.4f}",
            f"{each.mean_reciprocal_rank:.4f}",
            f"{each.same_top_10:.4f}",
            f"{each.least_cosine:.5f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.inputs_per_s:,.0f}",
        )
    how = Text(
        f"{report.tokens:,} tokens, {report.threads} threads, steps of {report.max_step_tokens} "
        f"tokens, medians of {report.rounds}"
    )
    return Group(table, how)
