"""What a run found, as one structure that is written as JSON and shown as a table.

Everything that is needed to judge or repeat the run travels with the figures: configuration,
versions, machine, date, and notes where the figures deserve doubt.
"""

from __future__ import annotations

import datetime as dt

import msgspec

from tokenpath.bench.load import Run
from tokenpath.bench.machine import Machine, machine, versions
from tokenpath.bench.measure import Distribution, Measurements
from tokenpath.bench.settings import Settings

FORMAT = 1
_LATE_S = 0.05
_LAG_S = 0.05
_BUSY = 0.9
_CACHED_SHARE = 0.05
_PACKAGES = ("tokenpath", "httptools", "msgspec", "numpy", "uvloop")


class Requests(msgspec.Struct, frozen=True):
    """``sent`` = ``completed`` + ``failed`` + ``interrupted``."""

    sent: int
    completed: int
    failed: int
    interrupted: int
    overflowed: int
    """Due, but not sent, because ``max_in_flight`` were running."""
    finish_reasons: dict[str, int]


class ErrorCount(msgspec.Struct, frozen=True):
    kind: str
    status: int | None
    code: str | None
    count: int
    example: str


class Tokens(msgspec.Struct, frozen=True):
    """Totals from the server's usage; None when it never reported."""

    prompt: int | None
    cached_prompt: int | None
    output: int | None
    planned_prompt: int
    """What the prompts counted in ``prompt`` were planned to have."""
    output_events: int
    per_output_event: float | None
    """Above 1, an event carries several tokens and a gap is between groups of tokens."""
    requests_without_usage: int
    unexpected_output_lengths: int


class Rates(msgspec.Struct, frozen=True):
    """Over the wall time of the run. Tokens are those of usage, and of completed requests."""

    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    output_events_per_s: float | None


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met every limit. The share is of all that ended or were turned away."""

    limits: dict[str, float]
    requests: int
    requests_per_s: float | None
    share: float | None


class Generator(msgspec.Struct, frozen=True):
    """Whether the load generator itself kept up."""

    lateness_s: Distribution
    loop_lag_s: Distribution
    cpu_share: float | None
    """Of one processor."""
    connections_opened: int


class Report(msgspec.Struct, frozen=True):
    """Everything about a run. Times are in seconds; latencies are of completed requests."""

    format: int
    date: str
    model: str
    configuration: Settings
    versions: dict[str, str]
    machine: Machine
    elapsed_s: float
    requests: Requests
    ttft_s: Distribution
    inter_token_s: Distribution
    time_per_output_token_s: Distribution
    end_to_end_s: Distribution
    rates: Rates
    tokens: Tokens
    goodput: Goodput | None
    errors: list[ErrorCount]
    generator: Generator
    notes: list[str]

    def json(self) -> bytes:
        """Write it as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def build(run: Run, model: str, *, now: dt.datetime) -> Report:
    """Compute the report of a run that ended or was stopped."""
    m = run.measured
    elapsed = run.elapsed_s
    report = Report(
        format=FORMAT,
        date=now.isoformat(timespec="seconds"),
        model=model,
        configuration=run.settings,
        versions=versions(_PACKAGES),
        machine=machine(),
        elapsed_s=elapsed,
        requests=Requests(
            m.sent, m.completed, m.failed, m.interrupted, m.overflowed, dict(m.finish_reasons)
        ),
        ttft_s=m.ttft.distribution(),
        inter_token_s=m.itl.distribution(),
        time_per_output_token_s=m.tpot.distribution(),
        end_to_end_s=m.e2e.distribution(),
        rates=_rates(m, elapsed),
        tokens=_tokens(m),
        goodput=_goodput(m, elapsed),
        errors=[
            ErrorCount(kind, status, code, count, m.error_examples[kind, status, code])
            for (kind, status, code), count in m.errors.most_common()
        ],
        generator=Generator(
            m.lateness.distribution(),
            m.loop_lag.distribution(),
            _per(run.cpu_s, elapsed),
            run.connections_opened,
        ),
        notes=[],
    )
    return msgspec.structs.replace(report, notes=_notes(report))


def _rates(m: Measurements, elapsed: float) -> Rates:
    known = m.completed > m.without_usage
    return Rates(
        requests_per_s=_per(m.completed, elapsed),
        output_tokens_per_s=_per(m.output_tokens, elapsed) if known else None,
        total_tokens_per_s=_per(m.output_tokens + m.prompt_tokens, elapsed) if known else None,
        output_events_per_s=_per(m.output_events, elapsed),
    )


def _tokens(m: Measurements) -> Tokens:
    reported = m.completed - m.without_usage
    cached_known = reported > m.without_cached_count
    per_event = None
    if reported and not m.without_usage:
        per_event = _per(m.output_tokens, m.output_events)
    return Tokens(
        prompt=m.prompt_tokens if reported else None,
        cached_prompt=m.cached_tokens if cached_known else None,
        output=m.output_tokens if reported else None,
        planned_prompt=m.planned_prompt_tokens,
        output_events=m.output_events,
        per_output_event=per_event,
        requests_without_usage=m.without_usage,
        unexpected_output_lengths=m.unexpected_lengths,
    )


def _goodput(m: Measurements, elapsed: float) -> Goodput | None:
    limits: dict[str, float] = msgspec.to_builtins(m.limits)
    if not limits:
        return None
    return Goodput(
        limits=limits,
        requests=m.good,
        requests_per_s=_per(m.good, elapsed),
        share=_per(m.good, m.ended + m.overflowed),
    )


def _notes(report: Report) -> list[str]:
    """Return sentences about what makes the figures doubtful."""
    notes = []
    generator, tokens, requests = report.generator, report.tokens, report.requests
    settings = report.configuration
    if (generator.lateness_s.p99 or 0.0) > _LATE_S:
        notes.append(
            f"The load generator was late: 1 % of requests left {generator.lateness_s.p99:.3f} s "
            "or more after they were due. Lower the rate or use a faster machine for it."
        )
    if (generator.loop_lag_s.p99 or 0.0) > _LAG_S or (generator.cpu_share or 0.0) > _BUSY:
        notes.append(
            "The load generator was short of processor time, so latencies include its own "
            f"slowness (event loop late by {generator.loop_lag_s.p99 or 0.0:.3f} s at p99, "
            f"{generator.cpu_share or 0.0:.0%} of one processor used)."
        )
    if requests.overflowed:
        notes.append(
            f"{requests.overflowed} requests were due while {settings.max_in_flight} were in "
            "flight and were not sent; raise --max-in-flight or lower the rate."
        )
    if requests.interrupted:
        notes.append(f"Stopped by hand with {requests.interrupted} requests in flight.")
    if tokens.requests_without_usage:
        notes.append(
            f"{tokens.requests_without_usage} answers came without usage; token figures leave "
            "them out."
        )
    if tokens.unexpected_output_lengths and settings.ignore_eos:
        notes.append(
            f"{tokens.unexpected_output_lengths} answers had another length than asked for: the "
            "server does not honour ignore_eos, or a limit of its own ended them."
        )
    if tokens.per_output_event is not None and tokens.per_output_event > 1.05:  # noqa: PLR2004 a grouping worth telling
        notes.append(
            f"An output event carries {tokens.per_output_event:.2f} tokens on average; "
            "inter-token figures are of the gaps between events."
        )
    if settings.shared_prefix_tokens == 0 and settings.trace is None and tokens.prompt:
        # A chat template's own beginning is the same in every request and may well be cached.
        template = max(0, tokens.prompt - tokens.planned_prompt)
        unwanted = (tokens.cached_prompt or 0) - template
        if unwanted > _CACHED_SHARE * tokens.prompt:
            notes.append(
                f"{unwanted / tokens.prompt:.0%} of the prompt tokens came from the server's cache "
                "though no prefix was shared on purpose; was the same --seed run before?"
            )
    if not all(
        figure.exact
        for figure in (
            report.ttft_s,
            report.inter_token_s,
            report.end_to_end_s,
            generator.lateness_s,
        )
    ):
        notes.append("More values came than are kept; percentiles are of a uniform sample.")
    return notes


def _per(amount: float, base: float) -> float | None:
    return amount / base if base > 0 else None
