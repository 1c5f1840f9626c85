"""Keeps one server process: starts it, waits until it is ready, tells why it is not, ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.peers.child import end
from bench.peers.drivers.harness import peak_resident_bytes
from bench.peers.http.contenders import HOST, Command
from bench.peers.install import last_line
from bench.peers.places import REPOSITORY

_POLL_S = 0.2
_PROBE_S = 5.0


class ServerError(Exception):
    """A server that does not start, or is gone; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    url: str
    start_s: float
    """From the start of the process until it was ready."""
    pid: int

    def peak_bytes(self) -> int:
        """Peak resident memory of all its processes so far."""
        return peak_resident_bytes(self.pid)


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def serving(
    command: Command, port: int, ready: str, *, limit_s: float, log: Path
) -> Iterator[Served]:
    """Run a server until the block ends. What it says goes to the end of ``log``.

    Raises ``ServerError`` if it is not ready within ``limit_s``.
    """
    with log.open("a") as out:
        started = time.monotonic()
        process = subprocess.Popen(
            command.arguments,
            cwd=REPOSITORY,
            env=os.environ | command.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://{HOST}:{port}{ready}", started + limit_s, log)
        yield Served(f"http://{HOST}:{port}/v1", time.monotonic() - started, process.pid)
        status = process.poll()
        if status is not None:
            raise ServerError(f"ended during the load with {_how(status)}: {last_line(log)}")
    finally:
        end(process)


def _wait(process: subprocess.Popen[str], url: str, deadline: float, log: Path) -> None:
    with httpx.Client(trust_env=False, timeout=_PROBE_S) as client:
        while time.monotonic() < deadline:
            status = process.poll()
            if status is not None:
                raise ServerError(
                    f"ended before it was ready with {_how(status)}: {last_line(log)}"
                )
            try:
                if client.get(url).is_success:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(_POLL_S)
    raise ServerError(f"not ready in time; the last that it said: {last_line(log)}")


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
