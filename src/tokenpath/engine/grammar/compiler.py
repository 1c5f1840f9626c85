"""Compiles grammars once, in threads of their own, within a time; keeps those used last.

Compiling takes from under a millisecond to a second, and must freeze nobody: the engine's step
thread only ever sees what is ready. The library bounds the work of one grammar by counting
operations; a time bounds how long a request waits for it. Whoever asks for a grammar that is being
compiled waits for the same result, and a refusal is kept like a success.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tokenpath.protocol.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    TokenpathError,
)
from tokenpath.protocol.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import CompiledGrammar
    from tokenpath.engine.grammar.vocabulary import Vocabulary

THREADS: Final = 2
"""So that one slow grammar does not hold up the others."""
MAX_WAITING: Final = 256
"""Grammars that wait for a thread; more are refused at once."""

_Key = tuple[GrammarKind, str]
log = logging.getLogger("tokenpath.engine")


@dataclass(slots=True, eq=False)
class _Job:
    grammar: Grammar
    future: Future[CompiledGrammar] = field(default_factory=Future)
    began: float | None = None
    """On the compiler's clock; None while it waits for a thread."""


class GrammarCompiler:
    """Grammars of one model. May be called from any thread."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        limit_s: float,
        cache_entries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make_vocabulary`` is called once, by the first grammar."""
        self.compiled_total = 0
        """Grammars compiled or refused."""
        self.hits_total = 0
        """Times that a grammar was found compiled, or being compiled."""
        self.compile_seconds_total = 0.0
        self._make_vocabulary = make_vocabulary
        self._limit_s = limit_s
        self._cache_entries = cache_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._done: OrderedDict[_Key, Future[CompiledGrammar]] = OrderedDict()
        """Least recently used first."""
        self._jobs: dict[_Key, _Job] = {}
        """Waiting and running."""
        self._waiting: deque[_Job] = deque()
        self._threads = 0

    @property
    def cached(self) -> int:
        """Grammars, and refusals, that are kept."""
        return len(self._done)

    @property
    def oldest(self) -> object | None:
        """What has been compiled for longest among what is being compiled; None if nothing is."""
        with self._lock:
            running = [job for job in self._jobs.values() if job.began is not None]
        return min(running, key=lambda job: job.began or 0.0, default=None)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar, waiting for it if need be.

        Raises:
            InvalidRequestError: it is wrong, or takes longer than the limit; ``param`` is its
                field.
            OverloadedError: too many others are being compiled.
        """
        future = self._start(grammar)
        try:
            return self._result(grammar, future, self._limit_s)
        except TimeoutError:
            raise self._late(grammar) from None

    async def ready(self, grammar: Grammar) -> CompiledGrammar:
        """As ``compile``, for a caller on an event loop. May be cancelled."""
        future = self._start(grammar)
        if not future.done():
            try:
                async with asyncio.timeout(self._limit_s):
                    await _done(future)
            except TimeoutError:
                raise self._late(grammar) from None
        return self._result(grammar, future, 0)

    @staticmethod
    def _result(
        grammar: Grammar, future: Future[CompiledGrammar], timeout_s: float
    ) -> CompiledGrammar:
        try:
            return future.result(timeout_s)
        except TokenpathError as error:
            # An exception must not be raised twice, and each request names its own field.
            raise type(error)(error.message, param=error.param or grammar.field) from None

    def _start(self, grammar: Grammar) -> Future[CompiledGrammar]:
        key = (grammar.kind, grammar.source)
        with self._lock:
            done = self._done.get(key)
            if done is not None and not _spent(done):
                self._done.move_to_end(key)
                self.hits_total += 1
                return done
            job = self._jobs.get(key)
            if job is not None:
                self.hits_total += 1
                return job.future
            if len(self._waiting) >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} grammars wait to be compiled already")
            job = self._jobs[key] = _Job(grammar)
            job.future.set_running_or_notify_cancel()  # nobody who waits can cancel it for others
            self._waiting.append(job)
            if self._threads < THREADS:
                self._threads += 1
                # Daemon: no compilation must keep an ending process alive.
                threading.Thread(target=self._work, name="grammar", daemon=True).start()
            return job.future

    def _work(self) -> None:
        """Compile until nothing waits any more."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                job = self._waiting.popleft()
                job.began = self._clock()
            compiled, error = self._outcome(job.grammar)
            with self._lock:
                self._keep(job, forget=isinstance(error, EngineError))
            if compiled is None:
                job.future.set_exception(error)
            else:
                job.future.set_result(compiled)

    def _keep(self, job: _Job, *, forget: bool) -> None:
        assert job.began is not None
        key = (job.grammar.kind, job.grammar.source)
        del self._jobs[key]
        self.compiled_total += 1
        self.compile_seconds_total += self._clock() - job.began
        if forget:
            return
        self._done[key] = job.future
        while len(self._done) > self._cache_entries:
            self._done.popitem(last=False)

    def _outcome(self, grammar: Grammar) -> tuple[CompiledGrammar | None, TokenpathError | None]:
        try:
            # Loads the library, which a server without grammars never needs.
            from tokenpath.engine.grammar.compile import compile_grammar  # noqa: PLC0415 - see above

            return compile_grammar(grammar, self._shared_vocabulary()), None
        except TokenpathError as error:
            return None, error
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            log.error("compiling a grammar failed: %s", type(error).__name__)  # noqa: TRY400 - the message may quote it
            return None, EngineError("the engine failed while it compiled the grammar")

    def _shared_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _late(self, grammar: Grammar) -> TokenpathError:
        """Whose fault it is that a grammar is not ready in time."""
        with self._lock:
            job = self._jobs.get((grammar.kind, grammar.source))
            now = self._clock()
            own = job is None or (job.began is not None and now - job.began >= self._limit_s / 2)
        if own:
            return InvalidRequestError(
                f"'{grammar.field}' takes longer than {self._limit_s:g} seconds to compile; make "
                "it simpler",
                param=grammar.field,
            )
        return OverloadedError("other grammars are being compiled; try again")


async def _done(future: Future[CompiledGrammar]) -> None:
    """Wait until a future has an outcome, without taking it."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[CompiledGrammar]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()


def _spent(done: Future[CompiledGrammar]) -> bool:
    """Whether a kept grammar has used up what its outputs may use together."""
    return done.done() and done.exception() is None and done.result().spent
