"""``tokenpath bench engine`` without its options: loads, measures round by round, reports."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from dataclasses import replace

from tokenpath.bench.engine import report, roofline, tasks
from tokenpath.bench.engine.cost import ModelCost, model_cost
from tokenpath.bench.engine.loaded import (
    LoadedModel,
    load,
    open_source,
    peak_resident_bytes,
    pool_tokens,
    resident_bytes,
)
from tokenpath.bench.engine.progress import Reporter
from tokenpath.bench.engine.session import Session, Span, TimedRunner
from tokenpath.bench.engine.works import Decode, Prefill, Work, check_fit
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.source import parse_source


def run(
    source: str,
    settings: EngineSettings,
    works: Sequence[Work],
    *,
    rounds: int,
    seed: int,
    with_roofline: bool,
    reporter: Reporter,
) -> report.EngineReport:
    """Measure ``works``, all of them in every round, so that a slow minute does not hit only one.

    Raises ``ModelError`` and ``SpecError`` as loading does, ``SpecError`` for a work that does not
    fit, ``EngineError`` if the engine did not do the work that was asked.
    """
    local, name = open_source(source, reporter.pulling), parse_source(source).name
    check_fit(
        works,
        model=name,
        model_tokens=local.config.max_context_tokens,
        pool_tokens=pool_tokens(local, settings),
        block_tokens=settings.block_tokens,
    )
    runners: list[TimedRunner] = []

    def around(runner: ModelRunner) -> TimedRunner:
        runners.append(TimedRunner(runner, time.perf_counter))
        return runners[0]

    loaded = load(local, settings, name=name, around=around, progress=reporter.loading)
    session = Session(loaded.core, runners[0], step_tokens=settings.max_step_tokens, seed=seed)
    reporter.say("warming up")
    if loaded.core.speculator is not None:
        loaded.core.speculator.paused = True
    session.warm_up()
    plain = [work for work in works if isinstance(work, Prefill | Decode)]
    spans: dict[Prefill | Decode, list[Span]] = {work: [] for work in plain}
    rss_bytes = peak_rss_bytes = 0
    probe = None
    for number in range(1, rounds + 1):
        for work in plain:
            reporter.say(f"round {number} of {rounds}: {work.name}")
            spans[work].append(session.measure(work))
        if number == 1:
            rss_bytes, peak_rss_bytes = resident_bytes(), peak_resident_bytes()
            if with_roofline and plain:
                # Not before memory was looked at: its operands are not the engine's. The first
                # round is held against the limits at its end, the others against their moments'.
                reporter.say(f"round {number} of {rounds}: the machine's limits")
                probe = roofline.Probe(_product(loaded), threads=loaded.runner.threads)
                now = probe()
                spans = {work: [replace(s, limits=(now,)) for s in spans[work]] for work in plain}
                session.probe = probe
    loaded.core.check_integrity()
    compared = {
        work.name: tasks.measure(
            loaded,
            work,
            step_tokens=settings.max_step_tokens,
            rounds=rounds,
            seed=seed,
            say=reporter.say,
        )
        for work in works
        if not isinstance(work, Prefill | Decode)
    }
    return report.build(
        subject=loaded.subject(),
        cost=_cost(loaded),
        spans=spans,
        tasks=compared,
        roofline=None if probe is None else probe.roofline,
        load_s=loaded.load_s,
        rss_bytes=rss_bytes,
        peak_rss_bytes=peak_rss_bytes,
        seed=seed,
        now=dt.datetime.now(dt.UTC),
    )


def _product(loaded: LoadedModel) -> roofline.Product:
    match loaded.core.card.dtype:
        case "float32":
            return "float32"
        case "bfloat16":
            return "bfloat16"
        case _:  # int8 and int4 weights are both multiplied as 8-bit integers
            return "int8"


def _cost(loaded: LoadedModel) -> ModelCost:
    runner = loaded.runner
    return model_cost(
        loaded.local.config,
        weight_bytes=loaded.core.card.weight_bytes,
        table_element_bytes=runner.dtype.itemsize if runner.kernels == "torch" else 1,
        kv_dtype=runner.kv_dtype,
    )
