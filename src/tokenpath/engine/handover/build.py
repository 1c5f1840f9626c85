"""Makes an engine's ends of handovers, from what the process was told at its start."""

from __future__ import annotations

from tokenpath.config.launch import HandoverLaunch, parse_address
from tokenpath.engine.handover.arrivals import Arrivals
from tokenpath.engine.handover.giving import Giver
from tokenpath.engine.kv_tiers.build import fingerprint_of
from tokenpath.engine.kv_tiers.copier import BlockCopier
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.models.local import LocalModel
from tokenpath.protocol.errors import ModelFileError


def shared_fingerprint(model: LocalModel, copier: BlockCopier, *, dtype: str) -> bytes:
    """Whose blocks would be understood here. Raises ``ModelFileError``."""
    try:
        return fingerprint_of(model, copier, dtype=dtype, by_time=False)
    except OSError as error:
        raise ModelFileError(f"the model's files cannot be read: {error.strerror}") from error


def make_arrivals(
    launch: HandoverLaunch,
    copier: BlockCopier,
    inner: KvTiers | None,
    *,
    fingerprint: bytes,
    block_tokens: int,
    step_bytes: int,
) -> Arrivals:
    """What a replica that decodes lets others compute. Raises ``SpecError``."""
    settings = launch.settings
    return Arrivals(
        copier,
        inner,
        fingerprint=fingerprint,
        block_tokens=block_tokens,
        min_prompt_tokens=settings.min_prompt_tokens,
        wait_s=settings.wait_s,
        buffer_bytes=settings.buffer_bytes,
        step_bytes=step_bytes,
        tls=launch.client_tls(),
    )


def make_giver(
    launch: HandoverLaunch,
    copier: BlockCopier,
    *,
    fingerprint: bytes,
    block_tokens: int,
    model: str,
    secret: str,
) -> Giver:
    """What a replica computes for others. Raises ``SpecError``."""
    return Giver(
        copier,
        fingerprint=fingerprint,
        block_tokens=block_tokens,
        model=model,
        secret=secret,
        addresses=[parse_address(text) for text in launch.listen],
        tls=launch.server_tls(),
        buffer_bytes=launch.settings.buffer_bytes,
    )
