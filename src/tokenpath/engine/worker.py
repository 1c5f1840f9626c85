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

A ``Sleep`` lets go of the core, weights and all; the thread and what it has imported stay, so that
a ``Wake`` has only the model to load. What the cores counted is added up over sleeps.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from tokenpath.engine.memory_release import give_back
from tokenpath.protocol.errors import EngineError, TokenpathError
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

    def close(self, *, keep_kv: bool = True) -> None:
        """Let go of what outlives the process, within seconds; the last call.

        Without ``keep_kv`` not even KV blocks that would survive a restart are kept.
        """


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


@dataclass(frozen=True, slots=True)
class Sleep:
    """Drop the core. No request is live."""

    keep_kv: bool


@dataclass(frozen=True, slots=True)
class Wake:
    """Load a core again."""


Command = Submit | Abort | QueryStats | Sleep | Wake


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

    def slept(self, totals: ReplicaStats) -> None:
        """The core is gone and its memory given back; ``totals`` is all that it has counted."""

    def wake_failed(self, error: TokenpathError) -> None:
        """There is no core, as before the wake."""

    def broke(self, error: BaseException) -> None:
        """The last call of a worker whose core raised."""


class Inbox:
    """Commands on their way from the event loop to the worker; bounded, and never blocks a put."""

    def __init__(self, max_commands: int = MAX_COMMANDS) -> None:
        self._max_commands = max_commands
        self._commands: list[Command] = []
        self._closed = False
        self._changed = threading.Condition()

    def put(self, command: Command) -> bool:
        """False when full. Only what somebody else can repeat is refused: requests and queries."""
        with self._changed:
            full = len(self._commands) >= self._max_commands
            if full and isinstance(command, Submit | QueryStats):
                return False
            self._commands.append(command)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Wake the worker for the last time."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """Everything that came in; with ``wait``, sleep until there is something.

        None once the inbox is closed.
        """
        with self._changed:
            while wait and not self._commands and not self._closed:
                self._changed.wait()
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
        """The core's, while there is one."""
        self.turn: int | None = None
        """A number of its own for each turn between two looks into the inbox; None outside."""
        self.loading: tuple[int, int] | None = None
        """While loading: which load, and how often it has reported progress."""
        self._load = load
        self._outlet = outlet
        self._clock = clock
        self._earlier = ReplicaStats()
        """Totals of the cores before this one."""
        self._loads = itertools.count()
        self._turns = itertools.count()
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
        core = self._loaded_core(self._outlet.load_failed)
        while core is not None:
            try:
                order = self._serve(core)
                with self._turning():
                    core.close(keep_kv=order is None or order.keep_kv)
                    if order is None:
                        return
                    self._earlier = self._stats(core).counted()
                    core = self.grammars = None
                    give_back()
            except Exception as error:
                log.exception("the engine's state cannot be trusted any more")
                self._outlet.broke(error)
                return
            self._outlet.slept(self._earlier)
            core = self._woken_core()

    def _woken_core(self) -> Core | None:
        """Sleep until a wake has succeeded; None once the inbox is closed."""
        while (commands := self.inbox.take(wait=True)) is not None:
            if any(isinstance(command, Wake) for command in commands):
                core = self._loaded_core(self._outlet.wake_failed)
                if core is not None:
                    return core
                give_back()
        return None

    def _loaded_core(self, failed: Callable[[TokenpathError], None]) -> Core | None:
        load, reports = next(self._loads), itertools.count(1)

        def progress(what: str, fraction: float) -> None:
            self.loading = (load, next(reports))
            self._outlet.progress(what, fraction)

        self.loading = (load, 0)
        error: TokenpathError
        try:
            core = self._load(progress)
            card, self.grammars = core.card, core.grammars
        except TokenpathError as refusal:
            # Its traceback would keep what was loaded so far.
            error = type(refusal)(refusal.message, param=refusal.param)
        except MemoryError:
            error = EngineError("there is not enough memory to load the model")
        except Exception as bug:
            log.exception("loading the model failed")
            error = EngineError(f"loading the model failed: {type(bug).__name__}: {bug}")
        else:
            self._outlet.loaded(card)
            return core
        finally:
            self.loading = None
        failed(error)
        return None

    def _serve(self, core: Core) -> Sleep | None:
        """Serve until the inbox is closed, or told to sleep."""
        working = False
        stats_due = self._clock()
        while (commands := self.inbox.take(wait=not working)) is not None:
            with self._turning():
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
                    stats = self._stats(core)
                    stats_due = now + STATS_INTERVAL_S
                if events or stats is not None:
                    self._outlet.stepped(StepResult(events, stats, queries))
                if gone_idle:
                    core.check_integrity()
            sleeps = [command for command in commands if isinstance(command, Sleep)]
            if sleeps:
                return sleeps[0]
        return None

    @contextmanager
    def _turning(self) -> Iterator[None]:
        self.turn = next(self._turns)
        try:
            yield
        finally:
            self.turn = None

    def _stats(self, core: Core) -> ReplicaStats:
        """The core's, with what the cores before it have counted."""
        return core.stats().after(self._earlier)

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
                case Sleep() | Wake():  # after the step; and awake already
                    continue
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
