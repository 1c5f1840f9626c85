"""Makes an engine's ends of handovers, from what the process was told at its start."""

from __future__ import annotations

from tokenpath.config.launch import HandoverLaunch, parse_address
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.handover.arrivals import Arrivals
from tokenpath.engine.handover.giving import Giver
from tokenpath.engine.kv_tiers.build import fingerprint_of
from tokenpath.engine.kv_tiers.copier import BlockCopier
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.models.local import LocalModel
from tokenpath.policy.handover import gives
from tokenpath.protocol.errors import ModelFileError


def shared_fingerprint(model: LocalModel, copier: BlockCopier, *, dtype: str) -> bytes:
    """Whose blocks would be understood here. Raises ``ModelFileError``."""
    try:
        return fingerprint_of(model, copier, dtype=dtype, by_time=False)
    except OSError as error:
        raise ModelFileError(f"the model's files cannot be read: {error.strerror}") from error


def make_ends(
    launch: HandoverLaunch,
    copier: BlockCopier,
    inner: KvTiers | None,
    *,
    model: LocalModel,
    dtype: str,
    name: str,
    settings: EngineSettings,
    secret: str,
) -> tuple[Arrivals | None, Giver | None]:
    """What a replica's role makes it take, and what it makes it give.

    ``inner`` are the tiers behind its pool; ``name`` is the served model's, ``dtype`` that of its
    weights. Raises ``SpecError`` and ``ModelFileError``.
    """
    fingerprint = shared_fingerprint(model, copier, dtype=dtype)
    arrivals, giver = None, None
    if launch.role == "decode":
        arrivals = Arrivals(
            copier,
            inner,
            fingerprint=fingerprint,
            block_tokens=settings.block_tokens,
            min_prompt_tokens=launch.settings.min_prompt_tokens,
            wait_s=launch.settings.wait_s,
            buffer_bytes=launch.settings.buffer_bytes,
            step_bytes=settings.kv_tiers.step_bytes,
            tls=launch.client_tls(),
        )
    if gives(launch.role) and launch.listen:
        giver = Giver(
            copier,
            fingerprint=fingerprint,
            block_tokens=settings.block_tokens,
            model=name,
            secret=secret,
            addresses=[parse_address(text) for text in launch.listen],
            tls=launch.server_tls(),
            buffer_bytes=launch.settings.buffer_bytes,
        )
    return arrivals, giver
