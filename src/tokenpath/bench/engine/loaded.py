"""A model brought into this process for measuring, with what the report says of it."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import msgspec
import psutil

from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import Around, Progress, build_engine, dtype_for
from tokenpath.engine.core import EngineCore, Runner
from tokenpath.engine.kv_cache import kv_blocks_for
from tokenpath.engine.precision import settle_kv_dtype
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import LocalModel, open_model
from tokenpath.models.progress import Progress as PullProgress
from tokenpath.models.source import resolve

PACKAGES = ("tokenpath", "torch", "numpy")
"""Those whose versions a report of the engine names."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    model: str
    architecture: str
    parameters: int
    dtype: str
    """Of the weights as held."""
    kv_dtype: str
    kernels: str
    """The native kernels' instruction set, or ``torch``."""
    threads: int
    weight_bytes: int
    kv_cache_bytes: int
    """Of the whole pool."""
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine, ready."""

    local: LocalModel
    core: EngineCore
    runner: ModelRunner
    load_s: float
    """From an opened file to being ready for a request: tokenizer, weights, KV pool."""
    settings: EngineSettings

    def subject(self) -> Subject:
        """What the report says of it."""
        card = self.core.card
        return Subject(
            model=card.name,
            architecture=card.architecture,
            parameters=card.parameters,
            dtype=card.dtype,
            kv_dtype=card.kv_dtype,
            kernels=self.runner.kernels,
            threads=self.runner.threads,
            weight_bytes=card.weight_bytes,
            kv_cache_bytes=card.kv_bytes_per_token * card.kv_blocks_total * card.block_tokens,
            max_step_tokens=self.settings.max_step_tokens,
        )


def open_source(source: str, progress: PullProgress) -> LocalModel:
    """The model's file or folder, pulled first if need be, without its weights.

    Raises ``ModelError`` (one of its leaves).
    """
    return open_model(resolve(source, models_dir=models_dir(), progress=progress))


def pool_tokens(local: LocalModel, settings: EngineSettings) -> int:
    """Tokens that the KV pool of these settings holds. Raises ``SpecError`` if not even a block."""
    blocks = kv_blocks_for(
        local.config,
        settle_kv_dtype(settings.kv_dtype, dtype_for(local.config, settings)),
        block_tokens=settings.block_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_cache_tokens=settings.kv_cache_tokens,
    )
    return blocks * settings.block_tokens


def load(
    local: LocalModel, settings: EngineSettings, *, name: str, around: Around, progress: Progress
) -> LoadedModel:
    """Load an opened model; ``around`` stands between its core and its runner.

    Raises as ``build_engine``.
    """
    runners: list[ModelRunner] = []

    def keep(runner: ModelRunner) -> Runner:
        runners.append(runner)
        return around(runner)

    started = time.perf_counter()
    core = build_engine(local, settings, name=name, progress=progress, around=keep)
    return LoadedModel(local, core, runners[0], time.perf_counter() - started, settings)


def resident_bytes() -> int:
    """This process's memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel brings its record up to date now and then only.
    return max(resident_bytes(), peak if sys.platform == "darwin" else peak * 1024)
