"""Makes an engine's tiers from its spec, and says whose blocks they may hold."""

from __future__ import annotations

import hashlib
import logging
from importlib import metadata
from pathlib import Path

from tokenpath.config import paths
from tokenpath.config.spec import KvTierSettings
from tokenpath.engine.kv_tiers.copier import BlockCopier
from tokenpath.engine.kv_tiers.folder import BlockFolder, open_folder
from tokenpath.engine.kv_tiers.sealed import HEADER_BYTES
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.engine.packed_cache import identity_of
from tokenpath.models.local import LocalModel
from tokenpath.protocol.errors import SpecError

log = logging.getLogger(__name__)


def make_tiers(
    settings: KvTierSettings,
    copier: BlockCopier,
    *,
    model: LocalModel,
    name: str,
    dtype: str,
    block_tokens: int,
) -> KvTiers:
    """The tiers behind a pool that ``copier`` reads; ``settings`` must ask for some.

    ``name`` is the served model's, ``dtype`` that of its weights. A disk that cannot be used is
    said in the log, and done without. Raises ``SpecError`` for a budget that does not hold one
    block.
    """
    for key, has, needs in (
        ("host_bytes", settings.host_bytes, copier.block_bytes),
        ("disk_bytes", settings.disk_bytes or None, copier.block_bytes + HEADER_BYTES),
    ):
        if has is not None and has < needs:
            raise SpecError(
                f"kv_tiers.{key} is {has}, but one block of {block_tokens} tokens takes {needs} "
                "bytes; give at least that much",
                param=f"kv_tiers.{key}",
            )
    folder, fingerprint = None, b""
    if settings.disk_bytes:
        try:
            fingerprint = fingerprint_of(model, copier, dtype=dtype)
            folder = _open(settings, name, fingerprint)
        except (OSError, SpecError) as error:
            log.warning("KV blocks are not kept on the disk: %s", error)
    return KvTiers(
        copier,
        block_tokens=block_tokens,
        host_bytes=settings.host_bytes,
        step_bytes=settings.step_bytes,
        disk_bytes=settings.disk_bytes,
        folder=folder,
        fingerprint=fingerprint,
        survive_restarts=settings.survive_restarts,
    )


def fingerprint_of(
    model: LocalModel, copier: BlockCopier, *, dtype: str, by_time: bool = True
) -> bytes:
    """Tells blocks apart that must not be exchanged: 32 bytes. Raises ``OSError``.

    ``by_time`` is left out where equal files on other machines are to count as equal.

    Everything that changes what is computed is in it: the weights, their type, the kernels, the
    order within a block and the version of this package.
    """
    weights = identity_of(model, f"KV of {dtype}", 0, by_time=by_time)
    whole = (weights, copier.layout, metadata.version("tokenpath"))
    return hashlib.sha256(repr(whole).encode()).digest()


def _open(settings: KvTierSettings, name: str, fingerprint: bytes) -> BlockFolder:
    given = settings.disk_path
    root = paths.cache_dir() / "kv" if given is None else Path(given).expanduser().absolute()
    return open_folder(root, model=name, fingerprint=fingerprint)
