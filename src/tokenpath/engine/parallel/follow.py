"""The process of a rank that is not the first: ``python -m tokenpath.engine.parallel.follow``.

It reads its order and then steps from standard input, computes each step together with the other
ranks, and ends when the input does: when rank 0 has ended, in whatever way. Only what
``messages`` describes goes to standard output.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import BinaryIO, Final

import msgspec

from tokenpath.engine.cpus import stay_on
from tokenpath.engine.parallel.messages import (
    HEADER_BYTES,
    Answer,
    Ended,
    Loading,
    Opened,
    RankOrder,
    Ready,
    body_bytes,
    read_batch,
)
from tokenpath.protocol.errors import EngineError, ReplicaLostError, TokenpathError

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 70
PR_SET_PDEATHSIG: Final = 1
LOG_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"
log = logging.getLogger("tokenpath.engine")


class Mouth:
    """Writes answers."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def say(self, answer: Answer) -> None:
        """Never raises: if nobody listens any more, standard input tells as well."""
        try:
            self._stream.write(msgspec.json.encode(answer) + b"\n")
            self._stream.flush()
        except OSError:
            return


def main() -> int:
    """Follow rank 0 until it ends; the exit code."""
    mouth = Mouth(_own_output())
    _end_with_parent()
    steps = sys.stdin.buffer
    try:
        order = msgspec.json.decode(steps.readline(), type=RankOrder)
    except msgspec.DecodeError:
        return EXIT_OK  # the parent ended before it had said everything
    logging.basicConfig(
        stream=sys.stderr, level=order.log_level.upper(), format=LOG_FORMAT, force=True
    )
    try:
        _follow(order, steps, mouth)
    except ReplicaLostError as error:
        # Rank 0 finds out by itself, and has the sentence that counts.
        log.debug("rank %d ends: %s", order.share.rank, error.message)
        return EXIT_BROKEN
    except TokenpathError as error:
        mouth.say(Ended(error.info()))
        return EXIT_BROKEN
    except Exception as error:
        log.exception("rank %d failed", order.share.rank)
        mouth.say(Ended(EngineError(f"it failed ({type(error).__name__})").info()))
        return EXIT_BROKEN
    return EXIT_OK


def _follow(order: RankOrder, steps: BinaryIO, mouth: Mouth) -> None:
    if order.cpus is not None:
        try:
            stay_on(order.cpus)
        except OSError as error:
            log.warning("rank %d is not held to its CPUs: %s", order.share.rank, error)
    from tokenpath.engine.parallel.member import join_ranks  # noqa: PLC0415 - takes seconds

    def progress(what: str, fraction: float) -> None:
        mouth.say(Loading(what, fraction))

    runner = join_ranks(order, opened=lambda: mouth.say(Opened()), progress=progress)
    mouth.say(Ready(runner.weight_bytes))
    while len(header := steps.read(HEADER_BYTES)) == HEADER_BYTES:
        body = steps.read(body_bytes(header))
        if len(body) < body_bytes(header):
            return
        runner.forward(read_batch(body))


def _own_output() -> BinaryIO:
    """Standard output for answers alone; whatever else is printed goes to standard error."""
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(kept, "wb")


def _end_with_parent() -> None:
    """A rank that is stopped, or computing, cannot see that its input has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the whole group gets it; rank 0 drains first
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    logging.shutdown()
    code = main()
    sys.stderr.flush()
    os._exit(code)
