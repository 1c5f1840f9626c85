"""One run of one engine process: its private folder, its output, its signals, its end.

The process gets a session of its own, so that Ctrl-C in the terminal reaches only the parent, and
signals go to its whole process group by id. Its output is logged line by line, and the last lines
are kept, because they are what explains a failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from tokenpath.config.launch import (
    HANDOVER_SECRET_VARIABLE,
    LINK_TOKEN_VARIABLE,
    EngineLaunch,
    HandoverLaunch,
    UnixAddress,
)
from tokenpath.config.spec import EngineSettings
from tokenpath.policy.handover import gives
from tokenpath.protocol.errors import SpecError
from tokenpath.protocol.handover import PrefillPeer

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "tokenpath.engine")
"""``-P``: a file in the working folder cannot stand in for an installed module."""
MAX_SOCKET_PATH_BYTES: Final = 103
"""What every system allows for a Unix socket's path."""
TAIL_LINES: Final = 40
MAX_LINE_BYTES: Final = 4096
OUTPUT_END_S: Final = 1.0


class EngineProcess:
    """A running engine process. Made by ``start``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        token: str,
        logger: logging.Logger,
        prefills_at: PrefillPeer | None = None,
    ) -> None:
        assert process.stdout is not None
        self.prefills_at = prefills_at
        """Where replicas of this machine order prompts; None: it takes no orders."""
        self.address = UnixAddress(_socket_path(folder))
        self.token = token
        self._process = process
        self._folder = folder
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._output = asyncio.create_task(self._pump(process.stdout, logger))

    @classmethod
    async def start(
        cls,
        *,
        name: str,
        model: Path,
        engine: EngineSettings,
        cpus: Sequence[int] | None,
        logger: logging.Logger,
        command: Sequence[str] = ENGINE_COMMAND,
        handover: HandoverLaunch | None = None,
        handover_secret: str | None = None,
    ) -> EngineProcess:
        """Start a process and give it its order; it listens on ``address`` soon after.

        ``handover_secret`` is what other machines know; without one the process gets its own.

        Raises ``SpecError`` when it cannot be started at all.
        """
        folder = _private_folder()
        token = secrets.token_hex(32)
        variables = {LINK_TOKEN_VARIABLE: token}
        prefills_at = None
        if handover is not None and gives(handover.role):
            here = str(UnixAddress(_handover_path(folder)))
            secret = handover_secret or secrets.token_hex(32)
            prefills_at = PrefillPeer(here, secret)
            variables[HANDOVER_SECRET_VARIABLE] = secret
            handover = handover.model_copy(update={"listen": [here, *handover.listen]})
        launch = EngineLaunch(
            name=name,
            model=model,
            engine=engine,
            handover=handover,
            cpus=None if cpus is None else list(cpus),
            listen=str(UnixAddress(_socket_path(folder))),
            parent_pid=os.getpid(),
            log_level=_level_name(logger.getEffectiveLevel()),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SpecError(f"the engine cannot be started: {error}") from error
        assert process.stdin is not None
        process.stdin.write(launch.model_dump_json().encode())
        process.stdin.close()
        return cls(process, folder, token, logger, prefills_at)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    @property
    def tail(self) -> list[str]:
        """The last lines it wrote."""
        return list(self._tail)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole process group, unless it has ended."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return  # it has ended, and the loop is about to learn it

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None if it still runs after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def discard(self) -> None:
        """Kill it if it still runs, reap it, read its last words and remove its folder."""
        self.signal(signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait([self._output], timeout=OUTPUT_END_S)
        self._output.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _pump(self, stream: asyncio.StreamReader, logger: logging.Logger) -> None:
        rest = b""
        while chunk := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line, logger)
        if rest:
            self._take(rest, logger)

    def _take(self, line: bytes, logger: logging.Logger) -> None:
        text = line.decode(errors="replace").rstrip()
        self._tail.append(text)
        level, _, rest = text.partition(" ")
        number = logging.getLevelNamesMapping().get(level)
        if number is None:  # a traceback, or a library writing by itself
            logger.warning("%s", text)
        else:
            logger.log(number, "%s", rest)


def _level_name(level: int) -> Literal["debug", "info", "warning", "error"]:
    if level <= logging.DEBUG:
        return "debug"
    if level <= logging.INFO:
        return "info"
    return "warning" if level <= logging.WARNING else "error"


def _private_folder() -> Path:
    """A new folder that only this user can enter, whose name leaves room for a socket's."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if os.access(runtime, os.W_OK | os.X_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tokenpath-", dir=parent))
    if len(os.fsencode(_handover_path(folder))) > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        raise SpecError(
            f"the path of {folder.parent} is too long for a socket; set TMPDIR to a shorter one"
        )
    return folder


def _socket_path(folder: Path) -> Path:
    return folder / "link"


def _handover_path(folder: Path) -> Path:
    return folder / "give"
