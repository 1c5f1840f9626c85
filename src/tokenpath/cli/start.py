"""From a spec to a running server: everything that can be wrong is found before it answers.

The order is that of how soon a mistake can be known: the port, the keys, the models (which may take
minutes to fetch), and only then the engines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable

import uvloop

from tokenpath.cli import banner, listening
from tokenpath.cli.banner import Say
from tokenpath.cli.deployment import prepare, prepare_again
from tokenpath.cli.server import Door, Server, replica_id
from tokenpath.config.paths import models_dir, state_file
from tokenpath.config.spec import Gateway, Spec
from tokenpath.fleet.cpu_division import divided_cpus
from tokenpath.gateway.auth import Authenticator
from tokenpath.models.progress import Progress
from tokenpath.models.progress_terminal import terminal_progress
from tokenpath.models.sizes import human_bytes
from tokenpath.observe.log import configure_logging
from tokenpath.protocol.errors import SpecError, TokenpathError, UnavailableError
from tokenpath.store.watcher import KeyWatcher

_log = logging.getLogger("tokenpath.serve")


def start(spec: Spec, *, read_again: Callable[[], Spec] | None = None) -> int:
    """Serve until told to stop; returns the exit code.

    ``read_again`` gives the spec as it is when a model is reloaded; without it, it is this one.

    Raises ``SpecError``, ``ModelError`` or ``UnavailableError`` for what is wrong with the set-up,
    the port, the keys' database or a model. With a JSON log the error is a line of it instead, and
    its exit code is returned.
    """
    configure_logging(spec.logging.level, spec.logging.format)
    _adopt_other_loggers()
    again = read_again or (lambda: spec)
    if spec.logging.format == "text":
        return _start(spec, again, say=_print, progress=terminal_progress())
    try:
        return _start(spec, again, say=_log_line, progress=_LogProgress())
    except TokenpathError as error:
        _log.error("%s", error.message)
        return error.exit_code


def _start(spec: Spec, again: Callable[[], Spec], *, say: Say, progress: Progress) -> int:
    if importlib.util.find_spec("torch") is None:
        raise SpecError("the native engine needs torch: pip install 'tokenpath[engine]'")
    gateway = spec.gateway
    with contextlib.ExitStack() as cleanup:
        bound = cleanup.enter_context(listening.bind(gateway.host, gateway.port))
        watcher = KeyWatcher(state_file()) if gateway.auth == "keys" else None
        ever_created = False
        if watcher is not None:
            ever_created = watcher.start().ever_created
            cleanup.callback(watcher.stop)
        listening.check_exposure(bound, auth=gateway.auth, ever_created=ever_created)
        models = prepare(spec, models_dir=models_dir(), progress=progress, say=say)
        threads = {replica_id(model): model.spec.engine.threads for model in models}
        server = Server(
            spec=spec,
            models=models,
            division=cleanup.enter_context(divided_cpus(threads)),
            prepare=lambda name: prepare_again(
                again(), name, models_dir=models_dir(), progress=_LogProgress(), say=_log_line
            ),
            bound=bound,
            authenticator=Authenticator(watcher, mode=gateway.auth),
            door=lambda: _door(gateway, watcher),
            say=say,
        )
        return uvloop.run(server.run())


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the terminal is what this is for


def _log_line(line: str) -> None:
    _log.info("%s", line)


class _LogProgress:
    """A pull's progress where another program reads the log: its beginnings and its notes."""

    def start(self, total: int | None, label: str) -> None:
        size = "" if total is None else f" ({human_bytes(total)})"
        _log_line(f"{label}{size}")

    def advance(self, amount: int) -> None:
        """Not worth a line."""

    def finish(self) -> None:
        """What comes next says it."""

    def note(self, text: str) -> None:
        _log_line(text)


def _door(gateway: Gateway, watcher: KeyWatcher | None) -> Door:
    """Who may come in at this moment; keys may have been made while the model was loading."""
    snapshot = None
    if watcher is not None:
        try:
            snapshot = watcher.current()
        except UnavailableError as error:
            return Door(line=f"Nobody can come in: {error.message}.", key_needed=True)
    ever_created = snapshot is not None and snapshot.ever_created
    line = banner.door_line(
        auth=gateway.auth,
        ever_created=ever_created,
        any_valid=snapshot is not None and bool(snapshot.valid),
    )
    return Door(line=line, key_needed=ever_created)


def _adopt_other_loggers() -> None:
    """Give warnings of libraries the form of our own log."""
    root = logging.getLogger()
    root.handlers[:] = logging.getLogger("tokenpath").handlers
    root.setLevel(logging.WARNING)
