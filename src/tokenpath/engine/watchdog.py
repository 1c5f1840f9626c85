"""Ends an engine process in which something does not end.

A thread of its own looks at what is going on: the step, the load, the grammar. Each look asks for
an identity that changes when there is progress, and ``policy.stall`` says when one has stayed too
long. Then the stacks of all threads go to standard error, clients are told by the event loop if
that still runs, and the process exits with ``EXIT_STUCK``, whatever hangs.

A computation that holds Python's lock while it hangs would stop this thread too; the native kernels
and torch let go of it while they compute.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenpath.config.launch import EXIT_STUCK
from tokenpath.policy.stall import Stall

MAX_TICK_S: Final = 1.0
TICKS: Final = 20
"""Looks within the shortest limit."""
LAST_WORDS_S: Final = 3.0
"""How long the event loop may take to tell the clients."""

log = logging.getLogger("tokenpath.engine")


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that must end, or make progress, in time."""

    limit_s: float
    sentence: str
    """What is said when it does not."""
    current: Callable[[], object | None]
    """What is going on now; None for nothing. Called from the watchdog's thread."""


class Watchdog:
    """Looks from ``start`` until ``stop``."""

    def __init__(
        self,
        watched: Sequence[Watched],
        on_stuck: Callable[[str], None],
        *,
        exit_process: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_stuck`` is called from the watchdog's thread with the sentence, and must not block.

        ``exit_process`` follows ``LAST_WORDS_S`` later, unless ``stop`` comes before.
        """
        shortest_s = min(each.limit_s for each in watched)
        self.tick_s = min(MAX_TICK_S, shortest_s / TICKS)
        self._watched = [(each, Stall(each.limit_s, most_s=2 * self.tick_s)) for each in watched]
        self._on_stuck = on_stuck
        self._exit_process = exit_process
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Does not wait for the thread."""
        self._stopped.set()

    def look(self, passed_s: float) -> str | None:
        """Look once, ``passed_s`` after the last time; the sentence of what is stuck."""
        stuck = [
            each.sentence
            for each, stall in self._watched
            if stall.observe(each.current(), passed_s)
        ]
        return stuck[0] if stuck else None

    def _run(self) -> None:
        looked = self._clock()
        while not self._stopped.wait(self.tick_s):
            now = self._clock()
            sentence = self.look(now - looked)
            looked = now
            if sentence is not None:
                self._end(sentence)
                return

    def _end(self, sentence: str) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        log.error("%s; ending the process", sentence)
        self._on_stuck(sentence)
        if not self._stopped.wait(LAST_WORDS_S):
            self._exit_process(EXIT_STUCK)
