"""Opens and loads the draft model of an engine, or says why it cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.draft_model import ModelDrafter
from tokenpath.engine.kv_cache import kv_blocks_for
from tokenpath.engine.packed_cache import PackedCache
from tokenpath.engine.precision import settle_kv_dtype, torch_dtype, weight_bits
from tokenpath.engine.runner import ModelRunner
from tokenpath.models import memory
from tokenpath.models.architecture import ModelConfig
from tokenpath.models.local import LocalModel, open_model
from tokenpath.models.source import resolve
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import ModelError, SpecError

_PARAM = "speculation.draft_model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that is opened, but not loaded."""

    model: LocalModel
    settings: EngineSettings
    dtype: memory.Dtype
    num_blocks: int

    @property
    def needed_bytes(self) -> int:
        """Memory of its weights, keys and values."""
        kv_dtype = settle_kv_dtype(self.settings.kv_dtype, self.dtype)
        token_bytes = self.model.config.kv_bytes_per_token(kv_dtype)
        kv_bytes = self.num_blocks * self.settings.block_tokens * token_bytes
        return memory.weight_bytes(self.model, self.dtype) + kv_bytes

    def load(self, tokenizer: Tokenizer, target: ModelConfig) -> ModelDrafter:
        """Load it, for a model of that tokenizer. Raises ``SpecError`` if its own is another."""
        settings = self.settings
        other = self.model.tokenizer().first_difference(tokenizer)
        if other is not None:
            raise SpecError(
                f"draft_model {settings.speculation.draft_model} has another vocabulary than the "
                f"model (id {other} is another token); use a smaller model of the same family",
                param=_PARAM,
            )
        bits = weight_bits(self.dtype)
        runner = ModelRunner(
            self.model,
            dtype=torch_dtype(self.dtype),
            kv_dtype=settle_kv_dtype(settings.kv_dtype, self.dtype),
            device=settings.device,
            num_blocks=self.num_blocks,
            block_tokens=settings.block_tokens,
            bits=bits,
            packed_cache=None if bits is None else PackedCache.usual(),
        )
        return ModelDrafter(
            runner,
            num_blocks=self.num_blocks,
            block_tokens=settings.block_tokens,
            step_tokens=settings.max_step_tokens,
            vocab=min(target.vocab_size, self.model.config.vocab_size),
            reducer=runner.reducer,
        )


def open_draft(
    settings: EngineSettings,
    *,
    tokens: int,
    settle: Callable[[ModelConfig, EngineSettings], memory.Dtype],
) -> DraftModel | None:
    """The draft model of the settings, if there is one.

    ``tokens`` is what the model's own KV pool holds; ``settle`` tells the type of weights.
    Raises ``SpecError`` if the draft model is not on this disk or cannot be read.
    """
    source = settings.speculation.draft_model
    if source is None:
        return None
    try:
        model = open_model(resolve(source, models_dir=models_dir(), pull=False))
    except ModelError as error:
        raise SpecError(f"draft_model {source}: {error.message}", param=_PARAM) from error
    dtype = settle(model.config, settings)
    blocks = kv_blocks_for(
        model.config,
        settle_kv_dtype(settings.kv_dtype, dtype),
        block_tokens=settings.block_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_cache_tokens=settings.speculation.draft_kv_cache_tokens or tokens,
    )
    return DraftModel(model, settings, dtype, blocks)
