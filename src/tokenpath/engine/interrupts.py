"""Ctrl-C in a script or notebook, without a half-done step.

An exception in the middle of a step would leave blocks planned but not recorded. So the signal
waits until the step is over, a fraction of a second; whoever presses twice does not wait.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold a SIGINT back until the end of the block; a second one in the block acts at once.

    Only the main thread receives signals; elsewhere, and where SIGINT is not handled in Python,
    this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])
