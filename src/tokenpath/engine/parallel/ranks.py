"""How ranks exchange activations in torch: gathers within a stage, sends from stage to stage.

Everything is exchanged as bytes, so that what arrives is what was computed in every dtype. A rank
that is gone, or silent for longer than the time limit, ends the exchange with ``ReplicaLostError``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from tokenpath.engine.parallel.share import ALL, Share
from tokenpath.protocol.errors import ReplicaLostError


class Ranks(Protocol):
    """What a rank's computation needs of the others; all of a stage call in the same order."""

    @property
    def share(self) -> Share:
        """This rank's own."""
        ...

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n] of each part to [T, parts * n] of all, side by side in the parts' order."""
        ...

    def pick(self, x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """[T, n] of each part to [T, n], row ``t`` being that of part ``parts[t]`` (int64 [T])."""
        ...

    def pass_on(self, x: torch.Tensor) -> None:
        """Send [T, n] to the same part of the next stage."""
        ...

    def take_over(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the same part of the stage before has passed on."""
        ...

    def answer(self, logits: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Bring float32 logits from part 0 of the last stage to rank 0, which gets them back.

        Others get None; only part 0 of the last stage has something to give.
        """
        ...


class Alone:
    """The ``Ranks`` of a model in one process."""

    share = ALL

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def pick(self, x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        del parts
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        del x
        raise AssertionError("there is no next stage")

    def take_over(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        del shape, dtype
        raise AssertionError("there is no stage before")

    def answer(self, logits: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        del shape
        return logits


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class LinkedRanks:
    """``Ranks`` over torch.distributed. Made by ``link_ranks``."""

    share: Share
    device: str
    stage_group: Any
    """A ``ProcessGroup`` of the parts of this stage; None if there is one part."""
    whole_group: Any
    """A ``ProcessGroup`` of all ranks; None if there is one stage."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        if self.share.parts == 1:
            return x
        gathered = self._gathered(x)
        return gathered.permute(1, 0, 2).reshape(len(x), self.share.parts * x.shape[1])

    def pick(self, x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        if self.share.parts == 1:
            return x
        return self._gathered(x)[parts, torch.arange(len(x), device=x.device)]

    def pass_on(self, x: torch.Tensor) -> None:
        self._send(x, self.share.rank + self.share.parts)

    def take_over(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._receive(shape, dtype, self.share.rank - self.share.parts)

    def answer(self, logits: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        share = self.share
        if share.stages == 1:
            return None if share.rank else logits
        if share.part or not shape[0]:
            return torch.empty(shape) if not share.rank else None
        if share.last:
            assert logits is not None
            self._send(logits, 0)
        last = share.size - share.parts
        return self._receive(shape, torch.float32, last) if not share.rank else None

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.share.parts, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            group = self.stage_group
            _complete(lambda: group._allgather_base(_bytes(gathered), _bytes(x.contiguous())))  # noqa: SLF001 - the name under which ProcessGroup has it
        return gathered

    def _send(self, x: torch.Tensor, rank: int) -> None:
        if x.numel():
            _complete(lambda: self.whole_group.send([_bytes(x.contiguous())], rank, 0))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        received = torch.empty(shape, dtype=dtype, device=self.device)
        if received.numel():
            _complete(lambda: self.whole_group.recv([_bytes(received)], rank, 0))
        return received


def link_ranks(
    share: Share, *, device: str, folder: Path, timeout_s: float, joins: bool
) -> LinkedRanks:
    """Meet the other ranks, who all call this with the same private folder.

    Without ``joins`` the parts of a stage have another way to exchange, and ``join`` and ``pick``
    are not for use.
    Raises ``ReplicaLostError`` if one does not come within the time limit.
    """
    # Ranks are on one machine: nothing of theirs is to be reached from outside. The library asks
    # the environment when it opens its sockets.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    limit = timedelta(seconds=timeout_s)
    try:
        store = FileStore(str(folder / "store"), share.size)
        store.set_timeout(limit)

        def group(name: str, rank: int, size: int) -> Any:
            return _group(PrefixStore(name, store), rank, size, device, limit)

        return LinkedRanks(
            share,
            device,
            group(f"stage{share.stage}", share.part, share.parts)
            if joins and share.parts > 1
            else None,
            group("all", share.rank, share.size) if share.stages > 1 else None,
        )
    except RuntimeError as error:
        raise _lost(error) from error


def _group(store: Any, rank: int, size: int, device: str, limit: timedelta) -> Any:
    if torch.device(device).type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit  # noqa: SLF001 - the name under which Options has it
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).flatten()


def _complete(begin: Callable[[], Any]) -> None:
    try:
        begin().wait()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> ReplicaLostError:
    first_line = str(error).partition("\n")[0]
    return ReplicaLostError(f"the ranks of this engine lost each other: {first_line}")
