"""``tokenpath models quantize`` without its options: calibrate, round, write, measure."""

from __future__ import annotations

import datetime as dt
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenpath.bench.engine import run as speed
from tokenpath.bench.engine.loaded import PACKAGES, open_source
from tokenpath.bench.engine.progress import Reporter
from tokenpath.bench.engine.works import Decode
from tokenpath.bench.machine import machine, versions
from tokenpath.bench.perplexity import run as perplexity
from tokenpath.bench.perplexity.text import Part
from tokenpath.bench.perplexity.windows import beginning, cut
from tokenpath.bench.quantize.report import FORMAT, Calibration, QuantizeReport, Row
from tokenpath.config.paths import cache_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.calibration import WIDEST, channel_activity
from tokenpath.engine.precision import settle_dtype, torch_dtype
from tokenpath.models.local import LocalModel, open_model
from tokenpath.models.memory import Dtype
from tokenpath.models.quantized.folder import check_target, write_folder
from tokenpath.models.quantized.recipe import Target, recipe_for
from tokenpath.protocol.errors import SpecError

CALIBRATION_TOKENS = 8192
_CALIBRATION_WINDOW = 512
_SPEED = Decode(1, 64)
_SCORED_STEP_TOKENS = 256
"""As ``bench perplexity`` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How the model is measured, before and after."""

    text: Sequence[Part]
    tokens: int | None
    """Scored at least; None: all of the text."""
    window: int = 1024
    threads: int | None = None
    rounds: int = 3
    """Of the speed, of which the median counts."""


def run(
    source: str,
    target: Target,
    out: Path,
    *,
    symmetric: bool,
    calibrate: Part | None,
    measure: Measure | None,
    reporter: Reporter,
) -> QuantizeReport:
    """Quantize ``source`` into the folder ``out``; with ``measure``, show what came of it.

    Raises ``ModelError`` if the source cannot be had or read or the folder not be written,
    ``SpecError`` for a text of too few tokens, ``EngineError`` if the engine fails.
    """
    check_target(out)
    model = open_source(source, reporter.pulling)
    recipe = recipe_for(model, target, symmetric=symmetric)
    started = time.perf_counter()
    activity: dict[str, torch.Tensor] = {}
    calibration = None
    if calibrate is not None:
        activity, calibration = _calibrated(model, calibrate, target, reporter)
    told = f"rounding to {target}"
    write_folder(
        model,
        recipe,
        activity,
        out,
        cache=cache_dir(),
        progress=lambda fraction: reporter.loading(told, fraction),
    )
    seconds = time.perf_counter() - started
    written = open_model(out)
    before = while_loading = after = None
    if measure is not None:
        before = _measured(source, model, "bfloat16", measure, reporter)
        while_loading = _measured(source, model, target, measure, reporter)
        after = _measured(str(out.absolute()), written, target, measure, reporter)
    return QuantizeReport(
        source=source,
        out=str(out),
        target=target,
        symmetric=recipe.symmetric,
        rounded=len(recipe.modules),
        kept=len(model.tensors) - len(recipe.modules),
        source_bytes=_stored(model),
        out_bytes=_stored(written),
        seconds=seconds,
        calibration=calibration,
        before=None if before is None else before[0],
        while_loading=None if while_loading is None else while_loading[0],
        after=None if after is None else after[0],
        perplexity_tokens=None if after is None else after[1],
        format=FORMAT,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(PACKAGES),
    )


def _calibrated(
    model: LocalModel, text: Part, target: Target, reporter: Reporter
) -> tuple[dict[str, torch.Tensor], Calibration]:
    tokenizer = model.tokenizer()
    ids = tokenizer.encode(text.text, add_special=False)
    window = min(_CALIBRATION_WINDOW, model.config.max_context_tokens)
    windows = list(
        cut(ids, window=window, first=beginning(tokenizer), least_scored=CALIBRATION_TOKENS)
    )
    if not windows:
        raise SpecError(
            f"--calibrate {text.name} has {len(ids)} tokens, too few to read activations from"
        )
    held = settle_dtype("auto", "cpu", native=False)
    started = time.perf_counter()
    activity = channel_activity(
        model,
        windows,
        dtype=torch_dtype(held),
        widest=WIDEST if target == "int4" else 0,  # 8 bits leave little to make up for
        loading=reporter.loading,
        reading=lambda number: reporter.say(f"calibrating: window {number} of {len(windows)}"),
    )
    gc.collect()  # the weights in bfloat16, before others are made
    return activity, Calibration(
        file=text.name,
        tokens=sum(map(len, windows)),
        seconds=time.perf_counter() - started,
    )


def _measured(
    source: str, model: LocalModel, dtype: Dtype, measure: Measure, reporter: Reporter
) -> tuple[Row, int]:
    """A row of the table, and how many tokens its perplexity is of."""

    def settings(**changes: object) -> EngineSettings:
        return EngineSettings.model_validate(
            {"dtype": dtype, "threads": measure.threads, "prefix_cache": False, **changes}
        )

    def text() -> Sequence[Part]:
        return measure.text

    scored = perplexity.run(
        source,
        settings(max_step_tokens=_SCORED_STEP_TOKENS),
        text,
        window=min(measure.window, model.config.max_context_tokens),
        tokens=measure.tokens,
        reporter=reporter,
    )
    gc.collect()
    timed = speed.run(
        source,
        settings(),
        [_SPEED],
        rounds=measure.rounds,
        seed=0,
        with_roofline=False,
        reporter=reporter,
    )
    gc.collect()
    row = Row(
        model=source,
        dtype=dtype,
        stored_bytes=_stored(model),
        weight_bytes=scored.measured.weight_bytes,
        perplexity=scored.perplexity,
        decode_tokens_per_s=timed.figures[_SPEED.name].median,
    )
    return row, scored.tokens


def _stored(model: LocalModel) -> int:
    return sum(tensor.stored_bytes for tensor in model.tensors.values())
