"""What the engine's benchmark found, as it is written to JSON.

The figures that are compared stand at the top level under their works' names; what they were
measured on, and how far they can be trusted, is nested beside them.
"""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenpath.bench.engine.cost import ModelCost
from tokenpath.bench.engine.loaded import PACKAGES, Subject
from tokenpath.bench.engine.roofline import Roofline
from tokenpath.bench.engine.session import Span
from tokenpath.bench.engine.tasks import TaskFigure
from tokenpath.bench.engine.works import (
    DECODE_STEPS,
    OVERHEAD_WORK,
    STEP_OVERHEAD,
    STRUCTURED_OVERHEAD,
    STRUCTURED_WORK,
    Decode,
    Prefill,
)
from tokenpath.bench.machine import Machine, machine, versions

FORMAT = 1


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One work over all rounds."""

    median: float
    """Tokens/s."""
    min: float
    max: float
    rounds: list[float]
    context_tokens: float
    """Mean context over the measured steps; a prefill's own length."""
    step_s: float
    """Median duration of a step of decoding, or of the whole prefill."""
    overhead: float
    """Median fraction of the time outside of the model's forward passes."""
    read_bytes_per_s: float
    """Weights, keys and values that had to be read, over the time."""
    product_ops_per_s: float
    """Operations of the products with weights, over the time."""
    read_limit_bytes_per_s: float | None
    """What the machine read just before and after, the median; None if it was not measured."""
    product_limit_ops_per_s: float | None
    """The same of its products."""
    read_share: float | None
    """Of the machine's read bandwidth in the same moment, the median over the rounds."""
    product_share: float | None
    """Of the machine's rate of products."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run. Times are in seconds, rates in tokens/s."""

    date: str
    subject: Subject
    machine: Machine
    versions: dict[str, str]
    seed: int
    load_s: float
    rss_bytes: int
    peak_rss_bytes: int
    figures: dict[str, Figure]
    """By the work's name."""
    tasks: dict[str, TaskFigure]
    """By the work's name."""
    roofline: Roofline | None

    @property
    def step_overhead(self) -> float | None:
        """Fraction of a step at batch 8 outside of the forward pass; None if not measured."""
        found = self.figures.get(OVERHEAD_WORK.name)
        return None if found is None else found.overhead

    @property
    def structured_overhead(self) -> float | None:
        """What a JSON schema adds to a step at batch 8, as a fraction; None if not measured.

        Only time outside of the forward pass is compared: the texts, and so the passes, differ.
        """
        found = self.figures.get(STRUCTURED_WORK.name)
        free = self.figures.get(OVERHEAD_WORK.name)
        if found is None or free is None:
            return None
        return (found.step_s * found.overhead - free.step_s * free.overhead) / free.step_s

    def json(self) -> bytes:
        """As indented JSON, works first."""
        document: dict[str, Any] = {name: f.median for name, f in self.figures.items()}
        for name, task in self.tasks.items():
            document |= task.ratios(name)
        if self.step_overhead is not None:
            document[STEP_OVERHEAD] = self.step_overhead
        if self.structured_overhead is not None:
            document[STRUCTURED_OVERHEAD] = self.structured_overhead
        document |= {
            "load_s": self.load_s,
            "rss_bytes": self.rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "format": FORMAT,
            "date": self.date,
            "measured": self.subject,
            "conditions": {"decode_steps": DECODE_STEPS, "seed": self.seed},
            "machine": self.machine,
            "versions": self.versions,
            "roofline": self.roofline,
            "spread": self.figures,
            "tasks": self.tasks,
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def build(
    *,
    subject: Subject,
    cost: ModelCost,
    spans: Mapping[Prefill | Decode, Sequence[Span]],
    tasks: Mapping[str, TaskFigure],
    roofline: Roofline | None,
    load_s: float,
    rss_bytes: int,
    peak_rss_bytes: int,
    seed: int,
    now: dt.datetime,
) -> EngineReport:
    """Put together what was measured; every work has a span of each round."""
    return EngineReport(
        date=now.isoformat(timespec="seconds"),
        subject=subject,
        machine=machine(),
        versions=versions(PACKAGES),
        seed=seed,
        load_s=load_s,
        rss_bytes=rss_bytes,
        peak_rss_bytes=peak_rss_bytes,
        figures={work.name: _figure(work, found, cost) for work, found in spans.items()},
        tasks=dict(tasks),
        roofline=roofline,
    )


def _figure(work: Prefill | Decode, spans: Sequence[Span], cost: ModelCost) -> Figure:
    rates = [span.tokens_per_s for span in spans]
    steps_s = [span.seconds / (span.steps if isinstance(work, Decode) else 1) for span in spans]
    step_s = statistics.median(steps_s)
    reads = [statistics.fmean(m.read_bytes_per_s for m in s.limits) for s in spans if s.limits]
    products = [statistics.fmean(m.product_ops_per_s for m in s.limits) for s in spans if s.limits]
    context = statistics.fmean(span.context_tokens for span in spans)
    if isinstance(work, Decode):
        read = cost.step_bytes(work.sequences, context)
        operations = work.sequences * (cost.token_operations + cost.head_operations)
    else:
        # Each step reads the weights, and the keys and values that came before it.
        steps = spans[0].steps
        read = steps * cost.weight_bytes + sum(
            cost.kv_bytes(work.tokens * step / steps) for step in range(steps)
        )
        operations = work.tokens * cost.token_operations + cost.head_operations
    return Figure(
        median=statistics.median(rates),
        min=min(rates),
        max=max(rates),
        rounds=rates,
        context_tokens=context,
        step_s=step_s,
        overhead=statistics.median(span.overhead for span in spans),
        read_bytes_per_s=read / step_s,
        product_ops_per_s=operations / step_s,
        read_limit_bytes_per_s=statistics.median(reads) if reads else None,
        product_limit_ops_per_s=statistics.median(products) if products else None,
        read_share=_share(read, steps_s, reads),
        product_share=_share(operations, steps_s, products),
    )


def _share(work: float, steps_s: Sequence[float], limits: Sequence[float]) -> float | None:
    """Median over the rounds of what was reached of the round's own limit."""
    if not limits:
        return None
    return statistics.median(
        work / step_s / limit for step_s, limit in zip(steps_s, limits, strict=True)
    )
