"""Assembles a pooling engine from a model and its settings, or says why it cannot be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import settle_device
from tokenpath.engine.cpus import default_threads
from tokenpath.engine.families.registry import find_family
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.loading import CheckpointLoader, Progress
from tokenpath.engine.pooling.bert import Bert
from tokenpath.engine.pooling.core import PoolingCore
from tokenpath.engine.pooling.encoder_weights import EncoderWeights
from tokenpath.engine.pooling.readers import ClassifierReader, DecoderReader, EncoderReader, Reader
from tokenpath.engine.precision import settle_dtype, torch_dtype
from tokenpath.engine.warm_up import rehearse_pooling
from tokenpath.models import memory
from tokenpath.models.encoder_model import EncoderModel
from tokenpath.models.local import LocalModel
from tokenpath.models.pooling import settle_pooling
from tokenpath.models.servable import Servable, input_limit, recipe_of, settle_task
from tokenpath.models.sizes import human_bytes
from tokenpath.policy.pooling import PoolingQueue
from tokenpath.protocol.errors import ModelError, SpecError
from tokenpath.protocol.replica import ModelCard


@dataclass(frozen=True, slots=True)
class _Loaded:
    reader: Reader
    weight_bytes: int


def build_pooling_engine(
    model: Servable,
    settings: EngineSettings,
    *,
    name: str,
    progress: Progress | None = None,
    available_bytes: Callable[[], int] = memory.available_bytes,
    warm: bool = False,
) -> PoolingCore:
    """Load a model and put a pooling engine around it.

    With ``warm`` it has read an input before: the first request waits for nothing but its own.
    Sets torch's number of threads for the whole process.

    Raises:
        ModelError: the weights do not fit in memory, or the model cannot be loaded (one of its
            leaves).
        SpecError: the settings do not fit the machine or the model.
    """
    task = settle_task(model, settings.task)
    device = settle_device(settings.device)
    dtype = pooling_dtype(model, settings)
    if device.type == "cpu":
        _check_memory(model, dtype, available_bytes())
    torch.set_num_threads(settings.threads or default_threads())
    context = input_limit(model, settings.max_context_tokens)
    step_tokens = max(settings.max_step_tokens, context)
    loaded = _load(model, settings, dtype, step_tokens, progress)
    labels = model.config.labels if isinstance(model, EncoderModel) else ()
    card = ModelCard(
        name=name,
        architecture=model.config.architecture,
        parameters=memory.parameters(model),
        vocab_size=model.config.vocab_size,
        max_context_tokens=context,
        dtype=dtype,
        kv_dtype=dtype,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=0,
        kv_blocks_total=0,
        block_tokens=settings.block_tokens,
        task=task,
        dimensions=loaded.reader.width if task == "embed" else None,
        labels=list(labels),
    )
    make_queue = functools.partial(
        PoolingQueue, max_step_tokens=settings.max_step_tokens, max_step_inputs=settings.max_running
    )
    if warm:
        rehearse_pooling(PoolingCore(loaded.reader, make_queue(), card=card), progress)
    process = psutil.Process()
    return PoolingCore(
        loaded.reader,
        make_queue(),
        card=card,
        resident_bytes=lambda: int(process.memory_info().rss),
    )


def pooling_dtype(model: Servable, settings: EngineSettings) -> memory.Dtype:
    """The type that a model's weights will be held in. Raises ``SpecError`` for quantized ones.

    ``auto`` is float32 for an encoder: it is small, and its vectors are compared with those that
    others have stored. A decoder's size makes bfloat16 the better choice where it is multiplied.
    """
    if settings.dtype in {"int8", "int4"}:
        raise SpecError(
            f"dtype {settings.dtype!r} is for models that generate; embeddings and scores are "
            "computed in 'float32' or 'bfloat16'",
            param="dtype",
        )
    if settings.dtype == "auto" and isinstance(model, EncoderModel):
        return "float32"
    return settle_dtype(settings.dtype, settings.device, native=False)


def _load(
    model: Servable,
    settings: EngineSettings,
    dtype: memory.Dtype,
    step_tokens: int,
    progress: Progress | None,
) -> _Loaded:
    pooling = settle_pooling(
        recipe_of(model),
        causal=isinstance(model, LocalModel),
        pooling=settings.pooling,
        normalize=settings.normalize,
    )
    kind, device = torch_dtype(dtype), settings.device
    with torch.inference_mode():
        if isinstance(model, EncoderModel):
            weights = EncoderWeights(model, kind, device, progress)
            bert = Bert.load(model.config, weights)
            reader: Reader = (
                EncoderReader(bert, pooling) if bert.head is None else ClassifierReader(bert)
            )
            return _Loaded(reader, weights.weight_bytes)
        backend = TorchBackend(kind, device)
        loader = CheckpointLoader(model, backend, kind, device, progress)
        decoder = find_family(model.config).build(model.config, loader)
        loader.finish()
        reader = DecoderReader(
            decoder, model.config, pooling, backend=backend, max_tokens=step_tokens
        )
        return _Loaded(reader, loader.weight_bytes)


def _check_memory(model: Servable, dtype: memory.Dtype, available: int) -> None:
    needed = memory.needed_bytes(model, dtype, 0)
    if needed > available:
        raise ModelError(
            f"{model.name} does not fit: {human_bytes(available)} of memory are available, but its "
            f"weights take {human_bytes(memory.weight_bytes(model, dtype))} in {dtype} and running "
            "them more"
        )
