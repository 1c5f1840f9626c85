"""The report as people read it on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenpath.bench.report import Report
from tokenpath.bench.settings import Settings


def render(report: Report) -> RenderableType:
    """Lay the report out for a terminal, in milliseconds where that reads better."""
    title = Text(f"{report.model} at {report.configuration.url}")
    times = Table(title=title, title_justify="left")
    times.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99", "max", "samples"):
        times.add_column(name, justify="right")
    for label, found in (
        ("time to first token", report.ttft_s),
        ("inter-token (every gap)", report.inter_token_s),
        ("per output token (mean)", report.time_per_output_token_s),
        ("end to end", report.end_to_end_s),
    ):
        figures = (found.mean, found.p50, found.p90, found.p99, found.max)
        times.add_row(label, *(_milliseconds(x) for x in figures), f"{found.count:,}")
    totals = Table(show_header=False, box=None, pad_edge=False)
    for label, value in _lines(report).items():
        totals.add_row(label, Text(value))
    parts: list[RenderableType] = [times if report.requests.completed else title, totals]
    for error in report.errors:
        name = " ".join(str(x) for x in (error.kind, error.status, error.code) if x is not None)
        parts.append(Text(f"error: {error.count} x {name}: {error.example}", style="red"))
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*parts)


def _lines(report: Report) -> dict[str, str]:
    requests, rates, tokens = report.requests, report.rates, report.tokens
    generator, goodput = report.generator, report.goodput
    lines = {"load": _load(report.configuration)}
    lines["requests"] = (
        f"{requests.completed} completed, {requests.failed} failed, "
        f"{requests.interrupted} interrupted, {requests.overflowed} not sent, "
        f"in {report.elapsed_s:.2f} s"
    )
    lines["rates"] = (
        f"{_number(rates.requests_per_s, 3)} requests/s, "
        f"{_number(rates.output_tokens_per_s)} output tokens/s, "
        f"{_number(rates.total_tokens_per_s)} total tokens/s"
    )
    lines["tokens"] = (
        f"{_whole(tokens.prompt)} prompt ({_whole(tokens.cached_prompt)} cached), "
        f"{_whole(tokens.output)} output in {tokens.output_events:,} events"
    )
    if goodput is not None:
        limits = ", ".join(f"{name} <= {seconds:g} s" for name, seconds in goodput.limits.items())
        share = "unknown" if goodput.share is None else f"{goodput.share:.1%}"
        lines["goodput"] = (
            f"{_number(goodput.requests_per_s, 3)} requests/s, {share} within {limits}"
        )
    late = generator.lateness_s.p99
    lines["generator"] = (
        ("" if late is None else f"late by {_milliseconds(late)} ms at p99, ")
        + f"event loop late by {_milliseconds(generator.loop_lag_s.p99)} ms at p99, "
        f"{generator.cpu_share or 0.0:.0%} of a processor, seed {report.configuration.seed}"
    )
    return lines


def _load(settings: Settings) -> str:
    if settings.mode == "closed":
        load = f"closed loop, {settings.concurrency} in flight"
    elif settings.mode == "poisson":
        load = f"Poisson arrivals, {settings.rate_per_s:g} a second"
    else:
        load = f"replay, time x {settings.time_scale:g}"
    if settings.trace is not None:
        return f"{load}; trace {Path(settings.trace).name}, lengths / {settings.length_divisor}"
    shared = settings.shared_prefix_tokens
    prefix = f" ({shared} shared)" if shared else ""
    return f"{load}; prompt {settings.prompt_tokens}{prefix}, output {settings.output_tokens}"


def _number(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def _whole(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:,.1f}"
