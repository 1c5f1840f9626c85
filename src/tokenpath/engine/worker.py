"""The engine's one compute thread: it loads the model, then turns commands into steps.

The event loop never waits for a step and the engine never waits for a socket. Between them are an
``Inbox`` drained before every step, so that an abort takes effect within one step, and an
``Outlet`` called once per step. A request is stamped when it is put into the inbox, so that its
wait for the running step counts as its time in the queue. When there is nothing to do the thread
sleeps on the inbox.

If ``Core.step`` raises, the failure was not one request's own (the core ends those by itself), so
the state of every sequence, block and batch is in doubt. The worker then stops for good, and the
process ends so that its supervisor starts a clean one: reloading a file that is in the page cache
costs seconds, and answering from a corrupt KV pool would cost trust.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from tokenpath.protocol.errors import EngineError, ReplicaLostError, TokenpathError
from tokenpath.protocol.events import EngineStages, Failed, Finish, TokenDelta
from tokenpath.protocol.link import ReplicaEvent
from tokenpath.protocol.pooling import PoolingRequest
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

if TYPE_CHECKING:
    from tokenpath.engine.grammar.compiler import GrammarCompiler
    from tokenpath.engine.grammar.state import CompiledGrammar

STATS_INTERVAL_S: Final = 0.5
"""While working, stats are published at least this often."""
MAX_COMMANDS: Final = 4096
"""Commands that may wait for the next step; aborts come on top, at most one per live request."""

Request = GenerationRequest | PoolingRequest

log = logging.getLogger("tokenpath.engine")


class Core(Protocol):
    """What the worker needs of an engine, which generates or pools. Used from one thread only.

    See ``engine.core.EngineCore`` and ``engine.pooling.core.PoolingCore``.
    """

    @property
    def card(self) -> ModelCard: ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles what ``submit`` is given; may be used from any thread."""
        ...

    def submit(self, request: Request, *, arrived: float, grammar: CompiledGrammar | None) -> None:
        """Queue a request that came in at ``arrived``, on the worker's clock.

        ``grammar`` is what the request's own was compiled to.
        Raises a ``TokenpathError`` that ends only this request.
        """

    def abort(self, request_id: str) -> Finish | None:
        """Forget a request, free what it held, and say how it ended; None for an unknown one."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> Sequence[ReplicaEvent]:
        """Compute one step; whatever it raises is fatal for the process."""
        ...

    def stats(self) -> ReplicaStats: ...

    def check_integrity(self) -> None:
        """Raise AssertionError naming the first broken invariant."""

    def watch(self, broken: Callable[[Exception], None]) -> None:
        """Call this, from any thread, if the engine breaks while no step is asked of it."""
        ...

    def close(self) -> None:
        """Let go of what outlives the process, within seconds; the last call."""


Progress = Callable[[str, float], None]
Load = Callable[[Progress], Core]


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request
    arrived: float
    """When it came in, on the worker's clock."""
    grammar: CompiledGrammar | None = None
    """What the request's grammar was compiled to."""


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class QueryStats:
    key: tuple[int, int]
    """Opaque here; comes back with the answer."""


Command = Submit | Abort | QueryStats


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened since the last one."""

    events: list[ReplicaEvent]
    stats: ReplicaStats | None
    """Present twice a second, when the engine has just gone idle, and when somebody asked."""
    answered: tuple[tuple[int, int], ...] = ()
    """Keys of the queries that ``stats`` answers."""


class Outlet(Protocol):
    """Where the worker reports. Called from the worker's thread."""

    def progress(self, what: str, fraction: float) -> None: ...

    def loaded(self, card: ModelCard) -> None: ...

    def load_failed(self, error: TokenpathError) -> None:
        """The last call of a worker that could not load."""

    def stepped(self, result: StepResult) -> None: ...

    def broke(self, error: BaseException) -> None:
        """The last call of a worker whose core raised."""


class Inbox:
    """Commands on their way from the event loop to the worker; bounded, and never blocks a put."""

    def __init__(self, max_commands: int = MAX_COMMANDS) -> None:
        self._max_commands = max_commands
        self._commands: list[Command] = []
        self._closed = False
        self._broken: Exception | None = None
        self._changed = threading.Condition()

    def put(self, command: Command) -> bool:
        """False when full; an abort is always taken, since refusing it would leak its request."""
        with self._changed:
            if len(self._commands) >= self._max_commands and not isinstance(command, Abort):
                return False
            self._commands.append(command)
            self._changed.notify()
            return True

    def fail(self, error: Exception) -> None:
        """Let the next ``take`` raise."""
        with self._changed:
            self._broken = error
            self._changed.notify()

    def close(self) -> None:
        """Wake the worker for the last time."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """Everything that came in; with ``wait``, sleep until there is something.

        None once the inbox is closed. Raises what ``fail`` was told.
        """
        with self._changed:
            while wait and not self._commands and not self._closed and self._broken is None:
                self._changed.wait()
            if self._broken is not None and not self._closed:
                raise self._broken
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            return commands


class Worker:
    """Runs a core in a thread of its own from ``start`` until ``stop``."""

    def __init__(
        self,
        load: Load,
        outlet: Outlet,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` is the core's too: both measure a request's stages."""
        self.inbox = Inbox()
        self.grammars: GrammarCompiler | None = None
        """The core's, once it is loaded."""
        self._load = load
        self._outlet = outlet
        self._clock = clock
        # Daemon: neither a step nor a load must keep an ending process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def now(self) -> float:
        """The time on the worker's clock."""
        return self._clock()

    def submit(
        self,
        request: Request,
        *,
        arrived: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> bool:
        """Hand over a request, which came in now or at ``arrived`` on the worker's clock.

        Never blocks; False if the inbox is full.
        """
        return self.inbox.put(Submit(request, arrived or self._clock(), grammar))

    def stop(self, wait_s: float = 0.0) -> None:
        """End after the current step, or at once when idle; waits for it only so long."""
        self.inbox.close()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        core = self._loaded_core()
        if core is None:
            return
        core.watch(self.inbox.fail)
        try:
            self._serve(core)
            core.close()
        except ReplicaLostError as error:
            log.error("%s", error.message)  # noqa: TRY400 - the sentence says it all
            self._outlet.broke(error)
        except Exception as error:
            log.exception("the engine's state cannot be trusted any more")
            self._outlet.broke(error)

    def _loaded_core(self) -> Core | None:
        try:
            core = self._load(self._outlet.progress)
            card, self.grammars = core.card, core.grammars
        except TokenpathError as error:
            self._outlet.load_failed(error)
        except MemoryError:
            self._outlet.load_failed(EngineError("there is not enough memory to load the model"))
        except Exception as error:
            log.exception("loading the model failed")
            self._outlet.load_failed(
                EngineError(f"loading the model failed: {type(error).__name__}: {error}")
            )
        else:
            self._outlet.loaded(card)
            return core
        return None

    def _serve(self, core: Core) -> None:
        working = False
        stats_due = self._clock()
        while (commands := self.inbox.take(wait=not working)) is not None:
            events, queries = self._apply(core, commands)
            worked = working or bool(commands)
            if core.has_work():
                if events:  # Whoever waits for an ending does not wait for the step as well.
                    self._outlet.stepped(StepResult(events, None))
                events = [*core.step()]
            working = core.has_work()
            gone_idle = worked and not working
            now = self._clock()
            stats = None
            if gone_idle or queries or now >= stats_due:
                stats = core.stats()
                stats_due = now + STATS_INTERVAL_S
            if events or stats is not None:
                self._outlet.stepped(StepResult(events, stats, queries))
            if gone_idle:
                core.check_integrity()

    def _apply(
        self, core: Core, commands: list[Command]
    ) -> tuple[list[ReplicaEvent], tuple[tuple[int, int], ...]]:
        events: list[ReplicaEvent] = []
        queries: list[tuple[int, int]] = []
        for command in commands:
            match command:
                case Submit(request, arrived):
                    error = self._submit(core, command)
                    if error is not None:
                        stages = EngineStages(queue_s=self._clock() - arrived)
                        events.append(Failed(request.request_id, error.info(), stages))
                case Abort(request_id):
                    finish = core.abort(request_id)
                    if finish is not None:
                        events.append(TokenDelta(request_id, finish=finish))
                case QueryStats(key):
                    queries.append(key)
        return events, tuple(queries)

    def _submit(self, core: Core, command: Submit) -> TokenpathError | None:
        request = command.request
        try:
            core.submit(request, arrived=command.arrived, grammar=command.grammar)
        except TokenpathError as error:
            return error
        except Exception:
            log.exception("submitting request %s failed", request.request_id)
            core.abort(request.request_id)
            return EngineError("the engine could not take the request")
        return None
