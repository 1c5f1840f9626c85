"""What quantizing a model did to it, as JSON and as a table."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenpath.bench.machine import Machine
from tokenpath.models.sizes import human_bytes

FORMAT = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One form of the model, run as it is served."""

    model: str
    dtype: str
    """Of the weights as held."""
    stored_bytes: int
    """Of all tensors on disk."""
    weight_bytes: int
    """Memory of the weights as held."""
    perplexity: float
    decode_tokens_per_s: float
    """Of one sequence."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What activations were read from."""

    file: str
    tokens: int
    seconds: float


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run."""

    source: str
    out: str
    target: str
    symmetric: bool
    rounded: int
    """Matrices that became codes."""
    kept: int
    """Tensors that did not."""
    source_bytes: int
    """Of all tensors on disk."""
    out_bytes: int
    seconds: float
    """To calibrate, round and write."""
    calibration: Calibration | None
    before: Row | None
    """The source in bfloat16; None if nothing was measured."""
    while_loading: Row | None
    """The source, rounded to the target type only as it is loaded."""
    after: Row | None
    """The result in the target type."""
    perplexity_tokens: int | None
    format: int
    date: str
    machine: Machine
    versions: dict[str, str]

    def json(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def render(report: QuantizeReport) -> RenderableType:
    """A row for each form that was measured, and what was written."""
    how = "symmetric" if report.symmetric else "with zero points"
    written = (
        f"{report.out}: {report.rounded} matrices in {report.target}, {how}, {report.kept} tensors "
        f"kept; {human_bytes(report.source_bytes)} became {human_bytes(report.out_bytes)} in "
        f"{report.seconds:.0f} s"
    )
    lines = [written]
    if report.calibration is not None:
        found = report.calibration
        lines.append(
            f"calibrated on {found.tokens:,} tokens of {found.file} ({found.seconds:.0f} s)"
        )
    rows = {
        "source": report.before,
        "source, rounded as it loads": report.while_loading,
        "quantized": report.after,
    }
    measured = {name: row for name, row in rows.items() if row is not None}
    if not measured:
        return Text("\n".join(lines))
    table = Table()
    table.add_column("model")
    table.add_column("type")
    for name in ("on disk", "in memory", "perplexity", "decode tokens/s"):
        table.add_column(name, justify="right")
    first = next(iter(measured.values()))
    for name, row in measured.items():
        change = row.perplexity / first.perplexity - 1
        beside = "" if row is first else f" ({change:+.1%})"
        table.add_row(
            name,
            row.dtype,
            human_bytes(row.stored_bytes),
            human_bytes(row.weight_bytes),
            f"{row.perplexity:.3f}{beside}",
            f"{row.decode_tokens_per_s:.1f}",
        )
    lines.append(f"perplexity on {report.perplexity_tokens:,} tokens")
    return Group(table, Text("\n".join(lines)))
