"""``tokenpath bench retrieval`` without its options: text to a task to vectors to figures."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tokenpath.bench.engine.loaded import PACKAGES
from tokenpath.bench.engine.progress import Reporter
from tokenpath.bench.machine import machine, versions
from tokenpath.bench.perplexity.text import Part
from tokenpath.bench.retrieval import task as tasks
from tokenpath.bench.retrieval.report import FORMAT, DtypeResult, RetrievalReport
from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.pooling.build import build_pooling_engine
from tokenpath.engine.pooling.core import PoolingCore
from tokenpath.models.servable import Servable, input_tokenizer, open_servable
from tokenpath.models.source import parse_source, resolve
from tokenpath.protocol.errors import EngineError, SpecError
from tokenpath.protocol.events import Failed
from tokenpath.protocol.pooling import PoolingInput, PoolingRequest
from tokenpath.protocol.replica import ModelCard

DTYPES: tuple[Literal["float32"], Literal["bfloat16"]] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class _Embedded:
    """What one number type made of all texts."""

    vectors: tasks.Floats
    seconds: float
    """Median over the rounds."""
    tokens: int
    """Of all texts."""
    card: ModelCard


def run(
    source: str,
    settings: EngineSettings,
    read_text: Callable[[], Sequence[Part]],
    *,
    passages: int,
    rounds: int,
    reporter: Reporter,
) -> RetrievalReport:
    """Embed a task of at most ``passages`` passages in each number type, and judge the rankings.

    Raises ``ModelError`` and ``SpecError`` as loading does, ``SpecError`` for a model that makes no
    embeddings or a text without two passages, ``EngineError`` if the engine fails.
    """
    path = resolve(source, models_dir=models_dir(), progress=reporter.pulling)
    model = open_servable(path, name=parse_source(source).name)
    task = tasks.cut([part.text for part in read_text()], most=passages)
    if len(task.passages) < 2:  # noqa: PLR2004 - one is always found
        raise SpecError(
            f"the text has fewer than two passages of {tasks.PASSAGE_WORDS} words to tell apart"
        )
    embedded = [
        _embed(model, settings.model_copy(update={"dtype": dtype}), task, rounds, reporter)
        for dtype in DTYPES
    ]
    exact, count = embedded[0], len(task.passages)
    return RetrievalReport(
        results=[_result(each, exact, count) for each in embedded],
        model=model.name,
        architecture=exact.card.architecture,
        dimensions=exact.vectors.shape[1],
        passages=count,
        tokens=exact.tokens,
        rounds=rounds,
        threads=torch.get_num_threads(),
        max_step_tokens=settings.max_step_tokens,
        format=FORMAT,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(PACKAGES),
    )


def _embed(
    model: Servable, settings: EngineSettings, task: tasks.Task, rounds: int, reporter: Reporter
) -> _Embedded:
    core = build_pooling_engine(model, settings, name=model.name, progress=reporter.loading)
    if core.card.task != "embed":
        raise SpecError(f"{model.name} makes no embeddings; its task is {core.card.task!r}")
    tokenizer = input_tokenizer(model)
    texts = (*task.passages, *task.questions)
    inputs = [tokenizer.single(text, keep=core.card.max_context_tokens) for text in texts]
    seconds: list[float] = []
    vectors = read(core, inputs)  # the first pass warms up
    for number in range(1, rounds + 1):
        reporter.say(f"embedding in {core.card.dtype}: round {number} of {rounds}")
        started = time.perf_counter()
        vectors = read(core, inputs)
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(each.token_ids) for each in inputs)
    return _Embedded(vectors, statistics.median(seconds), tokens, core.card)


def read(core: PoolingCore, inputs: list[PoolingInput]) -> tasks.Floats:
    """The vectors of one request with all inputs. Raises ``EngineError`` if it fails."""
    core.submit(PoolingRequest(request_id="bench", model=core.card.name, inputs=inputs))
    vectors = np.empty((len(inputs), core.card.dimensions or 0), dtype=np.float32)
    while core.has_work():
        for event in core.step():
            if isinstance(event, Failed):
                raise EngineError(f"the benchmark's request failed: {event.error.message}")
            rows = np.frombuffer(event.vectors, "<f4").reshape(len(event.places), -1)
            vectors[event.places] = rows
    return vectors


def _result(each: _Embedded, exact: _Embedded, passages: int) -> DtypeResult:
    order = tasks.ranking(each.vectors[passages:], each.vectors[:passages])
    truth = tasks.ranking(exact.vectors[passages:], exact.vectors[:passages])
    found = tasks.judge(order)
    return DtypeResult(
        dtype=each.card.dtype,
        recall_at_1=found.recall_at_1,
        recall_at_10=found.recall_at_10,
        mean_reciprocal_rank=found.mean_reciprocal_rank,
        same_top_10=tasks.agreement(order, truth, first=10),
        least_cosine=tasks.least_cosine(each.vectors, exact.vectors),
        tokens_per_s=each.tokens / each.seconds,
        inputs_per_s=2 * passages / each.seconds,
        weight_bytes=each.card.weight_bytes,
    )
