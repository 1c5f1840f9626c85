"""What KV tiers are worth: the time to a first token when a prefix was evicted from the pool.

Random prompts take turns, and the pool has room for a quarter of them: when a prompt's turn comes
again, nothing of it is left there. The time to its first token is measured with the prompt computed
again, with its blocks brought back from host memory, and from files that the disk must really be
read for. Scheduler, tiers and forward passes are those that serve; the loaded model is used with a
scheduler and tiers of its own.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from tokenpath.bench.engine.first_token import FirstToken, Say, median_s, turns
from tokenpath.bench.engine.works import Tiering
from tokenpath.config.paths import cache_dir
from tokenpath.engine.kv_tiers.folder import open_folder
from tokenpath.engine.kv_tiers.sealed import HEADER_BYTES
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.protocol.errors import EngineError

WORKING_SET = 4
"""Times the pool."""
POOL_PROMPTS = 2
_FINGERPRINT = bytes(32)


class TieringFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over all prompts and rounds; times are to the first token."""

    prompt_tokens: int
    prompts: int
    pool_tokens: int
    working_set_tokens: int
    block_bytes: int
    recomputed_s: float
    """Without tiers."""
    saving_s: float
    """Computed while evicted blocks are copied to the host and written to the disk."""
    host_s: float
    disk_s: float
    """From files that were pushed out of the system's cache before."""
    host_ratio: float
    """How many times faster than computing."""
    disk_ratio: float
    host_restored_tokens: int
    """Of each prompt, the median."""
    disk_restored_tokens: int

    def ratios(self, name: str) -> dict[str, float]:
        """As ``TaskFigure``."""
        return {f"{name}_host": self.host_ratio, f"{name}_disk": self.disk_ratio}

    def sentence(self) -> str:
        """As ``TaskFigure``."""
        return (
            f"first token after {self.recomputed_s * 1000:,.0f} ms computed, "
            f"{self.host_s * 1000:,.0f} ms from the host ({self.host_ratio:.1f} times faster), "
            f"{self.disk_s * 1000:,.0f} ms from the disk ({self.disk_ratio:.1f} times)"
        )


def measure(
    runner: ModelRunner, work: Tiering, *, step_tokens: int, rounds: int, seed: int, say: Say
) -> TieringFigure:
    """Run a work. Raises ``EngineError`` if blocks did not come from where they should."""
    rng = random.Random(seed)  # noqa: S311 - prompts are no secrets
    vocab = runner.config.vocab_size
    count = WORKING_SET * POOL_PROMPTS
    prompts = [rng.choices(range(vocab // 2, vocab), k=work.tokens) for _ in range(count)]
    size = runner.block_tokens
    pool_blocks = POOL_PROMPTS * -(-work.sequence_tokens // size)
    config = SchedulerConfig(
        max_step_tokens=step_tokens,
        max_running=1,
        block_tokens=size,
        num_blocks=pool_blocks,
        max_context_tokens=work.sequence_tokens,
    )
    block_bytes = runner.copier().block_bytes
    kept_blocks = (WORKING_SET + 1) * pool_blocks

    @contextmanager
    def tiers_on(root: Path) -> Iterator[KvTiers]:
        # Written at once, so that a second one finds on the disk what the first had in memory.
        made = KvTiers(
            runner.copier(),
            block_tokens=size,
            host_bytes=kept_blocks * block_bytes,
            step_bytes=64 << 20,
            disk_bytes=kept_blocks * (block_bytes + HEADER_BYTES),
            folder=open_folder(root, model="bench", fingerprint=_FINGERPRINT),
            fingerprint=_FINGERPRINT,
            survive_restarts=True,
        )
        with closing(made):
            yield made

    say(f"{work.name}: computing")
    plain = turns(runner, Scheduler(config), None, prompts[:3])
    host: list[FirstToken] = []
    disk: list[FirstToken] = []
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="bench-kv-") as folder:
        root = Path(folder)
        with tiers_on(root) as tiers:
            scheduler = Scheduler(config, tiers=tiers)
            say(f"{work.name}: computing, with tiers")
            saving = turns(runner, scheduler, tiers, prompts)
            for number in range(1, rounds + 1):
                say(f"{work.name}: round {number} of {rounds}, from the host")
                host += turns(runner, scheduler, tiers, prompts)
            tiers.close(scheduler.pool.cached_contents(), within_s=60)
        for number in range(1, rounds + 1):
            say(f"{work.name}: round {number} of {rounds}, from the disk")
            _forget_files(root)
            with tiers_on(root) as tiers:
                disk += turns(runner, Scheduler(config, tiers=tiers), tiers, prompts)
    for name, found in (("the host", host), ("the disk", disk)):
        if statistics.median(first.cached_tokens for first in found) < work.tokens // 2:
            raise EngineError(f"{work.name} brought less than half back from {name}: no result")
    recomputed_s = median_s(plain)
    return TieringFigure(
        prompt_tokens=work.tokens,
        prompts=count,
        pool_tokens=pool_blocks * size,
        working_set_tokens=count * work.tokens,
        block_bytes=block_bytes,
        recomputed_s=recomputed_s,
        saving_s=median_s(saving),
        host_s=median_s(host),
        disk_s=median_s(disk),
        host_ratio=recomputed_s / median_s(host),
        disk_ratio=recomputed_s / median_s(disk),
        host_restored_tokens=int(statistics.median(first.cached_tokens for first in host)),
        disk_restored_tokens=int(statistics.median(first.cached_tokens for first in disk)),
    )


def _forget_files(root: Path) -> None:
    """Push files out of the system's cache, so that the disk is read."""
    for path in root.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on the disk yet cannot be forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
