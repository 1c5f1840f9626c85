"""Runs a model: one plan of the scheduler in, the logits to be sampled out.

The runner owns the weights and the KV pool and knows nothing of requests, sampling or time.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from tokenpath.engine.batch import StepBatch, build_batch
from tokenpath.engine.families.registry import find_family
from tokenpath.engine.kernels.native_module import chosen_kernels, native_module
from tokenpath.engine.kernels.native_program import NativeProgram, obstacle
from tokenpath.engine.kernels.quantize import Bits
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.kv_cache import allocate_kv_cache
from tokenpath.engine.kv_tiers.copier import BlockCopier
from tokenpath.engine.layers import Decoder, Step
from tokenpath.engine.loading import CheckpointLoader, Progress
from tokenpath.engine.native_loading import load_native
from tokenpath.engine.packed_cache import PackedCache
from tokenpath.engine.rotary import rotaries
from tokenpath.engine.rows import TORCH, Reducer
from tokenpath.models.architecture import KvDtype, ModelConfig
from tokenpath.models.local import LocalModel
from tokenpath.models.memory import parameters
from tokenpath.policy.sequence import StepPlan

log = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with its KV pool. Not thread-safe: one step at a time."""

    def __init__(
        self,
        model: LocalModel,
        *,
        dtype: torch.dtype,
        device: str,
        num_blocks: int,
        block_tokens: int,
        kv_dtype: KvDtype | None = None,
        bits: Bits | None = None,
        packed_cache: PackedCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load the weights and allocate the pool.

        With ``bits`` weights are quantized, and computed with by the native kernels where they are
        there; ``dtype`` is that of activations where they are not, and of KV unless ``kv_dtype``
        says otherwise. What is packed for the kernels is kept in ``packed_cache``, if there is one.

        Raises ``ModelUnsupportedError`` for an unknown family, ``ModelFileError`` for tensors
        that do not fit the model's metadata.
        """
        self.config: ModelConfig = model.config
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._device = device
        self._backend = TorchBackend(dtype, device, bits)
        self._rotaries = rotaries(self.config, device)
        self._native: NativeProgram | None = None
        self._decoder: Decoder | None = None
        self.weight_bytes = 0
        """Memory of the weights as held."""
        self.parameters = parameters(model)
        self.threads = torch.get_num_threads()
        """That compute."""
        if kv_dtype is None:
            kv_dtype = "float32" if dtype == torch.float32 else "bfloat16"
        self.kv_dtype: KvDtype = kv_dtype
        self.kv_bytes_per_token = self.config.kv_bytes_per_token(kv_dtype)
        kernels = None if bits is None else usable_kernels(self.config, dtype, device, block_tokens)
        family = find_family(self.config)
        with torch.inference_mode(), ThreadPoolExecutor(1) as aside:
            # Touching the pool's memory for the first time takes as long as reading weights that
            # are packed already.
            allocated = aside.submit(
                allocate_kv_cache,
                self.config,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                dtype=kv_dtype,
                device=device,
            )
            if bits is not None and kernels is not None:
                decoder, self.weight_bytes = load_native(
                    model,
                    bits,
                    family=family,
                    backend=self._backend,
                    native=native_module(),
                    threads=self.threads,
                    cache=packed_cache,
                    progress=progress,
                )
            else:
                loaded = dtype if bits is None else torch.float32
                loader = CheckpointLoader(model, self._backend, loaded, device, progress)
                self._decoder = decoder = family.build(self.config, loader)
                loader.finish()
                self.weight_bytes = loader.weight_bytes
            self._cache = allocated.result()
            if kernels is not None:
                self._native = NativeProgram(
                    native_module(),
                    kernels,
                    decoder,
                    cache=self._cache,
                    rotaries=dict(self._rotaries),
                    block_tokens=block_tokens,
                    threads=self.threads,
                )

    @property
    def kernels(self) -> str:
        """What computes: the native kernels' instruction set, or ``torch``."""
        return "torch" if self._native is None else self._native.kernels

    @property
    def reducer(self) -> Reducer:
        """What the sampler passes over logits with."""
        return TORCH if self._native is None else self._native.reducer

    def copier(self) -> BlockCopier:
        """Reads and writes whole blocks of the KV pool. Not while a step runs."""
        return BlockCopier(self._cache, kernels=self.kernels)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Compute a plan of at least one chunk.

        Returns float32 [sampled rows, vocab], in the order of the plan's chunks: one for each that
        samples, and one more for each drafted token. Keys and
        values of all the plan's tokens are in the pool afterwards; running the plan again gives
        the same result.
        """
        return self.forward(build_batch(plan, self.block_tokens))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute a batch: float32 [sampled rows, vocab], in the order of ``sampled_rows``."""
        if self._native is not None:
            return self._native.run(batch)
        assert self._decoder is not None
        positions = torch.from_numpy(batch.positions).to(self._device)
        step = Step(
            token_ids=torch.from_numpy(batch.token_ids).to(self._device),
            slots=torch.from_numpy(batch.slots).to(self._device),
            angles={kind: rotary.angles(positions) for kind, rotary in self._rotaries.items()},
            attention=self._backend.plan_attention(batch, self._decoder.attention_specs),
            cache=self._cache,
        )
        hidden = self._decoder.hidden(step)
        rows = torch.from_numpy(batch.sampled_rows).to(self._device)
        return self._decoder.logits(hidden.index_select(0, rows))


def usable_kernels(
    config: ModelConfig, dtype: torch.dtype, device: str, block_tokens: int
) -> str | None:
    """The native kernels for quantized weights of a model; None, logged unless chosen: torch.

    ``dtype`` is that of activations elsewhere. Raises ``SpecError`` as ``chosen_kernels``.
    """
    kernels = chosen_kernels() if torch.device(device).type == "cpu" else None
    if kernels is None:
        return None
    reason = obstacle(config, block_tokens)
    if dtype != torch.bfloat16:
        reason = "the native kernels keep KV in bfloat16 or int8"
    if reason is not None:
        log.warning("computing with torch, not with the native kernels: %s", reason)
        return None
    return kernels
