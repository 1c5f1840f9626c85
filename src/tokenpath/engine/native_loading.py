"""Gets a model's packed weights: kept from an earlier start, or made from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenpath.engine.families.registry import Family
from tokenpath.engine.kernels.base import KernelBackend
from tokenpath.engine.kernels.packed import Bytes, PackedWeights, huge_memory
from tokenpath.engine.kernels.quantize import Bits
from tokenpath.engine.layers import Decoder
from tokenpath.engine.loading import Progress
from tokenpath.engine.packed_cache import PackedCache, identity_of
from tokenpath.engine.packing import PackedLoader, Packer, packed_bytes
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

    def pack(memory: Bytes) -> PackedWeights:
        packer = Packer(
            model,
            bits,
            memory=memory,
            backend=backend,
            native=native,
            threads=threads,
            progress=progress,
        )
        with packer:
            family.build(model.config, packer)
            return packer.finish()

    share = backend.share
    size = packed_bytes(model, bits, native, share)
    if cache is None:
        weights = pack(huge_memory(size))
    else:
        of_all = (
            "" if share.size == 1 else f".{share.part}of{share.parts}x{share.stage}of{share.stages}"
        )
        weights = _kept_or_packed(
            model, f"int{bits}{of_all}", cache, native, threads, tell, size, pack
        )
    return family.build(model.config, PackedLoader(weights, backend)), weights.used


def _kept_or_packed(
    model: LocalModel,
    form: str,
    cache: PackedCache,
    native: Any,
    threads: int,
    tell: Progress,
    size: int,
    pack: Callable[[Bytes], PackedWeights],
) -> PackedWeights:
    layout, source = native.PACKED_LAYOUT, model.path
    identity = identity_of(model, form, layout)

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
        if weights is not None:
            return weights
        with cache.file_for(form, identity, size, layout=layout, source=source) as file:
            if file is None:
                return pack(huge_memory(size))
            weights = pack(file.memory)
            cache.publish(
                file, form, identity, weights, source=source, native=native, threads=threads
            )
            return kept() or weights
