"""Gets a model's packed weights: kept from an earlier start, or made from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenpath.engine.families.registry import Family
from tokenpath.engine.kernels.base import KernelBackend
from tokenpath.engine.kernels.packed import PackedWeights
from tokenpath.engine.kernels.quantize import Bits
from tokenpath.engine.layers import Decoder
from tokenpath.engine.loading import Progress
from tokenpath.engine.packed_cache import PackedCache, identity_of
from tokenpath.engine.packing import PackedLoader, Packer
from tokenpath.models.local import LocalModel


def load_native(
    model: LocalModel,
    bits: Bits,
    *,
    family: Family,
    backend: KernelBackend,
    native: Any,
    threads: int,
    cache: PackedCache | None,
    progress: Progress | None = None,
) -> tuple[Decoder, int]:
    """A decoder of packed weights, and their memory in bytes.

    ``backend`` is what the decoder's layers are told to have; native programs do not use it.
    Without ``cache`` weights are packed and not kept. Raises ``ModelFileError``.
    """
    tell = progress or (lambda _what, _fraction: None)

    def pack() -> PackedWeights:
        with Packer(
            model, bits, backend=backend, native=native, threads=threads, progress=progress
        ) as packer:
            family.build(model.config, packer)
            return packer.finish()

    if cache is None:
        weights = pack()
    else:
        weights = _kept_or_packed(model, f"int{bits}", cache, native, threads, tell, pack)
    return family.build(model.config, PackedLoader(weights, backend)), weights.used


def _kept_or_packed(
    model: LocalModel,
    form: str,
    cache: PackedCache,
    native: Any,
    threads: int,
    tell: Progress,
    pack: Callable[[], PackedWeights],
) -> PackedWeights:
    identity = identity_of(model, form, native.PACKED_LAYOUT)

    def kept() -> PackedWeights | None:
        return cache.read(
            form,
            identity,
            native=native,
            threads=threads,
            progress=lambda fraction: tell("reading packed weights", fraction),
        )

    weights = kept()
    if weights is not None:
        return weights
    with cache.packing(lambda: tell("waiting for another process to pack its weights", 0.0)):
        weights = kept()
        if weights is None:
            weights = pack()
            tell("keeping packed weights for the next start", 1.0)
            cache.write(form, identity, weights, source=model.path, native=native, threads=threads)
    return weights
