"""Starts the ranks of a divided model, of which rank 0 is this process, and loads all at once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.cpus import cpu_limit, stay_on, usable_cpus, write_cpu_list
from tokenpath.engine.loading import Progress
from tokenpath.engine.parallel.crew import Crew, MeetingRoom
from tokenpath.engine.parallel.member import MEETING_BYTES, join_ranks, open_meeting
from tokenpath.engine.parallel.messages import RankOrder
from tokenpath.engine.parallel.share import Share
from tokenpath.engine.precision import torch_dtype, weight_bits
from tokenpath.engine.runner import ModelRunner, usable_kernels
from tokenpath.models.architecture import KvDtype
from tokenpath.models.local import LocalModel
from tokenpath.models.memory import Dtype
from tokenpath.policy.cpu_shares import Share as CpuShare
from tokenpath.policy.cpu_shares import divide
from tokenpath.protocol.errors import ReplicaLostError, SpecError

log = logging.getLogger("tokenpath.engine")


def refuse_undivided(
    settings: EngineSettings, device: torch.device, *, hands_over: bool = False
) -> None:
    """Raise ``SpecError`` for settings that a divided model cannot have."""
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    if ranks == 1:
        return
    if hands_over:
        raise SpecError(
            "roles hand over whole blocks of keys and values, of which each rank of a divided "
            "model has only a part; leave the roles out, or set tensor_parallel and "
            "pipeline_parallel to 1",
            param="tensor_parallel" if settings.tensor_parallel > 1 else "pipeline_parallel",
        )
    if settings.kv_tiers.host_bytes:
        raise SpecError(
            "kv_tiers keep whole blocks, of which each rank of a divided model has only a part; "
            "leave kv_tiers out, or set tensor_parallel and pipeline_parallel to 1",
            param="kv_tiers",
        )
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        raise SpecError(
            f"tensor_parallel times pipeline_parallel is {ranks}, but this machine has "
            f"{torch.cuda.device_count()} GPUs, and every rank needs one",
            param="tensor_parallel",
        )


def load_divided(
    model: LocalModel,
    share: Share,
    settings: EngineSettings,
    *,
    name: str,
    dtype: Dtype,
    kv_dtype: KvDtype,
    num_blocks: int,
    progress: Progress | None,
) -> tuple[ModelRunner, Crew]:
    """Rank 0's runner, and the others, which follow it; ``share`` is rank 0's.

    This process stays on rank 0's CPUs until the crew is closed. Raises as ``ModelRunner`` does,
    for any rank, and ``ReplicaLostError`` if one does not come up.
    """
    cpus = _cpus(share, settings.threads)
    native = weight_bits(dtype) is not None and usable_kernels(
        model.config, torch_dtype(dtype), settings.device, settings.block_tokens, parts=share.parts
    )
    room = MeetingRoom(
        stages=share.stages, memory_bytes=MEETING_BYTES if native and share.parts > 1 else 0
    )
    orders = [
        RankOrder(
            share=rank,
            model=str(model.path),
            name=name,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=_device(settings.device, rank),
            num_blocks=num_blocks,
            block_tokens=settings.block_tokens,
            threads=cpus[rank.part].threads,
            cpus=list(cpus[rank.part].cpus),
            folder=str(room.folder),
            meeting=room.of(rank.stage),
            timeout_s=settings.rank_timeout_s,
            log_level=logging.getLevelName(log.getEffectiveLevel()).lower(),
        )
        for rank in share.ranks()
    ]
    before = sorted(cpu.number for cpu in usable_cpus())
    tell = _one_by_one(progress)
    crew = Crew(
        orders[1:],
        descriptors=room.descriptors,
        timeout_s=settings.rank_timeout_s,
        progress=tell,
        on_close=lambda: _stay_on(before),
    )
    try:
        _stay_on(cpus[0].cpus)
        meeting = open_meeting(orders[0])
        if meeting is not None:
            crew.watch(lambda _lost: meeting.give_up())
        runner = _load(model, orders[0], crew, meeting, tell)
    except BaseException:
        crew.close()
        raise
    finally:
        room.close()
    return runner, crew


def _load(
    model: LocalModel, order: RankOrder, crew: Crew, meeting: Any, progress: Progress
) -> ModelRunner:
    progress("starting the other ranks", 0.0)
    crew.wait_opened()
    try:
        runner = join_ranks(order, model=model, meeting=meeting, progress=progress)
    except ReplicaLostError as error:
        raise crew.reason(error) from error
    crew.wait_ready()
    runner.lead(crew)
    return runner


def _one_by_one(progress: Progress | None) -> Progress:
    """The same for several threads."""
    lock = threading.Lock()

    def tell(what: str, fraction: float) -> None:
        with lock:
            if progress is not None:
                progress(what, fraction)

    return tell


def _device(name: str, rank: Share) -> str:
    return f"cuda:{rank.rank}" if torch.device(name).type == "cuda" else name


def _cpus(share: Share, threads: int | None) -> Sequence[CpuShare]:
    """What each part of a stage computes on; stages take turns, and all may use everything."""
    cpus = usable_cpus()
    limit = cpu_limit(len(cpus))
    each = None if threads is None else max(1, threads // share.parts)
    division = divide(cpus, [each] * share.parts, limit=limit)
    if division.oversubscribed or (threads is not None and threads < share.parts):
        log.warning(
            "%d ranks compute at the same time on %d CPUs; they take each other's time: "
            "tensor_parallel gains nothing beyond the CPUs that the engine has",
            share.parts,
            min(division.capacity, threads or division.capacity),
        )
    for part, its in enumerate(division.shares):
        log.info("part %d of %d computes on CPUs %s (threads: %d)", part, share.parts,
                 write_cpu_list(its.cpus), its.threads)  # fmt: skip
    return division.shares


def _stay_on(cpus: Sequence[int]) -> None:
    try:
        stay_on(cpus)
    except OSError as error:
        log.warning("rank 0 (process %d) is not held to its CPUs: %s", os.getpid(), error)
