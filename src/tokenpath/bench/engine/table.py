"""The engine's report as people read it on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenpath.bench.engine.report import EngineReport
from tokenpath.bench.engine.roofline import Roofline
from tokenpath.models.sizes import human_bytes


def render(report: EngineReport) -> RenderableType:
    """One row per work, and below what the whole run found."""
    subject = report.subject
    title = Text(
        f"{subject.model}, {subject.dtype}, KV {subject.kv_dtype}, {subject.kernels} kernels, "
        f"{subject.threads} threads"
    )
    works = Table(title=title, title_justify="left")
    works.add_column("work")
    for name in ("tokens/s", "min to max", "ms", "of the read limit", "of the product limit"):
        works.add_column(name, justify="right")
    for name, figure in report.figures.items():
        works.add_row(
            name,
            f"{figure.median:,.1f}",
            f"{figure.min:,.1f} to {figure.max:,.1f}",
            f"{figure.step_s * 1000:,.1f}",
            _share(figure.read_share, figure.read_limit_bytes_per_s, 1e9, "GB/s"),
            _share(figure.product_share, figure.product_limit_ops_per_s, 1e12, "Tops/s"),
        )
    totals = Table(show_header=False, box=None, pad_edge=False)
    for label, value in _lines(report).items():
        totals.add_row(label, Text(value))
    return Group(works, totals)


def _lines(report: EngineReport) -> dict[str, str]:
    subject = report.subject
    rounds = max((len(figure.rounds) for figure in report.figures.values()), default=0)
    lines = {
        "rounds": f"{rounds}; figures are medians, ms are of a decoding step or a whole prefill",
        "load": f"{report.load_s:.2f} s",
        "memory": (
            f"{human_bytes(report.rss_bytes)} resident, {human_bytes(report.peak_rss_bytes)} at "
            f"the peak; weights {human_bytes(subject.weight_bytes)}, KV cache "
            f"{human_bytes(subject.kv_cache_bytes)}"
        ),
    }
    if report.step_overhead is not None:
        lines["step overhead"] = f"{report.step_overhead:.1%} of a step at 8 sequences"
    if report.structured_overhead is not None:
        lines["structured"] = (
            f"a JSON schema adds {report.structured_overhead:.1%} to a step at 8 sequences"
        )
    lines |= {name: task.sentence() for name, task in report.tasks.items()}
    if report.roofline is not None:
        lines["limits"] = _limits(report.roofline)
    return lines


def _limits(roofline: Roofline) -> str:
    return (
        f"reads {roofline.read_bytes_per_s / 1e9:.1f} GB/s ({roofline.read_method}), "
        f"{roofline.product_dtype} products {roofline.product_ops_per_s / 1e12:.2f} Tops/s "
        f"({roofline.product_method}), with operands of {human_bytes(roofline.operand_bytes)}"
    )


def _share(share: float | None, limit: float | None, unit: float, name: str) -> str:
    """Such as ``88% of 63.1 GB/s``."""
    if share is None or limit is None:
        return "-"
    return f"{share:.0%} of {limit / unit:,.2f} {name}"
