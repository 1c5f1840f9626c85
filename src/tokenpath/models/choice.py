"""Which model of a spec's list is served: the first that is servable and fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenpath.models import memory
from tokenpath.models.encoder_model import EncoderModel
from tokenpath.models.library import Library
from tokenpath.models.servable import Servable, open_servable
from tokenpath.models.sizes import human_bytes
from tokenpath.models.source import (
    CatalogueSource,
    PathSource,
    Source,
    existing,
    parse_source,
)
from tokenpath.protocol.errors import ModelError


def first_that_fits(
    sources: Sequence[str],
    *,
    models_dir: Path,
    dtype: memory.Dtype,
    kv_cache_bytes: int,
    available_bytes: int,
) -> Source:
    """The first source whose weights, KV pool and overhead fit in ``available_bytes``.

    Nothing is pulled: a catalogue model that is not here is judged by the catalogue. A single
    source is taken as it is, since refusing it on an estimate would help nobody. A ``pypi:`` or
    ``hf:`` model that is not here counts as fitting: nothing is known of it. Raises ``ModelError``
    if none fits.
    """
    parsed = [parse_source(text) for text in sources]
    if len(parsed) == 1:
        return parsed[0]
    too_big = []
    for source in parsed:
        needed = estimate_bytes(source, models_dir, dtype, kv_cache_bytes)
        if needed is None or needed <= available_bytes:
            return source
        too_big.append(f"{source.text} needs {human_bytes(needed)}")
    raise ModelError(
        f"no model fits in the {human_bytes(available_bytes)} of memory available: "
        f"{', '.join(too_big)} (in {dtype}, with the KV cache)"
    )


def estimate_bytes(
    source: Source, models_dir: Path, dtype: memory.Dtype, kv_cache_bytes: int
) -> int | None:
    """Memory for serving ``source``; None if nothing is known of it before it is pulled."""
    if isinstance(source, PathSource):
        return _needed(open_servable(existing(source)), dtype, kv_cache_bytes)
    pulled = Library(models_dir).find(source)
    if pulled is not None:
        return _needed(open_servable(pulled.path), dtype, kv_cache_bytes)
    if isinstance(source, CatalogueSource):
        kv_bytes = 0 if source.entry.kind == "embedding" else kv_cache_bytes
        return memory.needed_bytes_unseen(source.entry.parameters, dtype, kv_bytes)
    return None


def _needed(model: Servable, dtype: memory.Dtype, kv_cache_bytes: int) -> int:
    """An encoder keeps no keys and values."""
    kv_bytes = 0 if isinstance(model, EncoderModel) else kv_cache_bytes
    return memory.needed_bytes(model, dtype, kv_bytes)
