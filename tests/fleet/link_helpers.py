"""What the tests of the link and of the local fleet share."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt


def request(request_id: str, *, kind: int = 1, max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        model="scripted",
        prompt=TokenPrompt([kind]),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; the other side of a socket has no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
