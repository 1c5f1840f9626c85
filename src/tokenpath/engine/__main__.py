"""The engine process: ``python -m tokenpath.engine [LAUNCH.json]``.

Reads an ``EngineLaunch`` as JSON from the named file or from standard input, and the link's secret
from the environment. Listens before it loads, so that gateways see the progress; torch is imported
by the compute thread as the first part of loading. SIGTERM drains, a second one ends at once;
SIGINT is ignored, because Ctrl-C is the parent's to handle.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

import pydantic
import uvloop

from tokenpath.config.launch import (
    EXIT_OK,
    LINK_TOKEN_VARIABLE,
    EngineLaunch,
    TcpAddress,
    parse_address,
)
from tokenpath.engine.cpus import stay_on
from tokenpath.engine.server import EngineServer
from tokenpath.engine.worker import Core, Load, Progress
from tokenpath.protocol.errors import SpecError, TokenpathError

PARENT_CHECK_S: Final = 1.0
PR_SET_PDEATHSIG: Final = 1
LOG_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"
"""Without a time: the parent logs these lines again with its own."""

log = logging.getLogger("tokenpath.engine")


def main(argv: list[str]) -> int:
    """Run an engine process; its exit code, which ``engine.server`` explains."""
    try:
        if importlib.util.find_spec("torch") is None:
            raise SpecError("the native engine needs torch: pip install 'tokenpath[engine]'")
        launch = read_launch(argv)
        return run(launch, os.environ.pop(LINK_TOKEN_VARIABLE, ""), native(launch))
    except TokenpathError as error:
        print(f"ERROR tokenpath.engine: {error.message}", file=sys.stderr, flush=True)  # noqa: T201 - logging may not be set up
        return error.exit_code


def read_launch(argv: list[str]) -> EngineLaunch:
    """The launch order from the file named in ``argv``, or from standard input.

    Raises ``SpecError``.
    """
    try:
        text = Path(argv[0]).read_text() if argv else sys.stdin.read()
        return EngineLaunch.model_validate_json(text)
    except OSError as error:
        raise SpecError(f"the launch order cannot be read: {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"the launch order is wrong at '{where}': {first['msg']}") from error


def native(launch: EngineLaunch) -> Load:
    """Loads the real engine. Nothing of torch is imported before it is called."""

    def load(progress: Progress) -> Core:
        progress("importing torch", 0.0)
        from tokenpath.engine.build import build_engine  # noqa: PLC0415 - takes seconds
        from tokenpath.engine.pooling.build import build_pooling_engine  # noqa: PLC0415
        from tokenpath.models.local import LocalModel  # noqa: PLC0415
        from tokenpath.models.servable import open_servable, settle_task  # noqa: PLC0415

        model = open_servable(launch.model, name=launch.name)
        generates = settle_task(model, launch.engine.task) == "generate"
        if generates and isinstance(model, LocalModel):
            return build_engine(
                model,
                launch.engine,
                name=launch.name,
                progress=progress,
                warm=launch.engine.warm_up,
            )
        return build_pooling_engine(
            model, launch.engine, name=launch.name, progress=progress, warm=launch.engine.warm_up
        )

    return load


def run(launch: EngineLaunch, token: str, load: Load) -> int:
    """Serve what ``load`` builds until drained, broken or orphaned. Raises ``SpecError``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)  # the socket is for this user only
    logging.basicConfig(
        stream=sys.stderr, level=launch.log_level.upper(), format=LOG_FORMAT, force=True
    )
    _stay_on(launch.cpus)
    address = parse_address(launch.listen)
    tls = None if launch.tls is None else launch.tls.context()
    if isinstance(address, TcpAddress):
        if not token:
            raise SpecError(f"a link on {address} needs a secret in {LINK_TOKEN_VARIABLE}")
        if tls is None and not address.is_loopback:
            log.warning("the link on %s is not encrypted: prompts can be read on the way", address)

    async def serve() -> int:
        server = EngineServer(load, token=token, settings=launch.engine)
        _drain_on_sigterm(server, launch.drain_grace_s)
        if launch.parent_pid is not None:
            _end_with_parent(server, launch.parent_pid)
        return await server.serve(address, tls)

    return uvloop.run(serve())


def _stay_on(cpus: list[int] | None) -> None:
    if cpus is None:
        return
    try:
        stay_on(cpus)
    except OSError as error:  # they were there when the parent chose them
        log.warning("the engine is not held to its CPUs %s: %s", cpus, error)


def end_process(exit_code: int) -> NoReturn:
    """End at once, without finalizing the interpreter.

    With torch and a loaded model that takes seconds, and under a thread that is still computing
    or loading it may crash or hang. What must be cleaned up, ``EngineServer.serve`` has.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _drain_on_sigterm(server: EngineServer, grace_s: float) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await server.drain(grace_s)
        server.end(EXIT_OK)

    def on_sigterm() -> None:
        if draining:
            server.end(EXIT_OK)
        else:
            log.info("draining")
            draining.append(loop.create_task(drain()))

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)


def _end_with_parent(server: EngineServer, parent_pid: int) -> None:
    """Never outlive the parent: the kernel kills us where it can, and we look ourselves.

    Linux sends the signal when the parent's *thread* that started us ends; fleets start engines
    from the event loop's thread, which lives as long as they do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    loop = asyncio.get_running_loop()

    def check() -> None:
        if os.getppid() != parent_pid:
            log.warning("the parent process has ended")
            server.end(EXIT_OK)

    def check_regularly() -> None:
        check()
        loop.call_later(PARENT_CHECK_S, check_regularly)

    server.on_disconnect = check
    check_regularly()


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
