"""Asks pip where a package's wheel is and what its hash must be, and how pip reaches the network.

pip, not we, knows the user's index, mirrors, find-links and certificates; so no host is named
here. Only wheels are asked for, and only as a dry run: no package's code is run or installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
import msgspec

from tokenpath.models.http import open_client
from tokenpath.protocol.errors import PullError

_PIP_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where one package's wheel is, and its hash."""

    package: str
    """Normalized name."""
    version: str
    url: str
    sha256: str


class _Archive(msgspec.Struct, frozen=True):
    hashes: dict[str, str] = {}


class _Download(msgspec.Struct):
    url: str
    archive_info: _Archive = _Archive()


class _Metadata(msgspec.Struct):
    name: str
    version: str


class _Install(msgspec.Struct):
    download_info: _Download
    metadata: _Metadata


class _Report(msgspec.Struct):
    install: Annotated[list[_Install], msgspec.Meta(min_length=1)]


def find_wheels(requirements: Sequence[str]) -> list[Wheel]:
    """The wheel of each requirement (``NAME`` or ``NAME==VERSION``), in the same order.

    Raises ``PullError`` when pip is missing, fails, or does not know a wheel and its sha256.
    """
    output = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:",
        "--no-input", "--quiet", "--report", "-", *requirements,
    )  # fmt: skip
    try:
        report = msgspec.json.decode(output, type=_Report)
    except msgspec.DecodeError as error:
        raise PullError(f"pip's answer could not be understood: {error}") from error
    found = {normalize(item.metadata.name): item for item in report.install}
    return [_wheel(requirement, found) for requirement in requirements]


def http_client() -> httpx.Client:
    """A client that reaches the network as pip does: its certificates and its proxy."""
    settings = _settings()
    return open_client(cert=settings.get("cert"), proxy=settings.get("proxy"))


def normalize(package: str) -> str:
    """One spelling of a package's name, as in PEP 503."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _wheel(requirement: str, found: dict[str, _Install]) -> Wheel:
    package = normalize(requirement.partition("==")[0])
    if package not in found:
        raise PullError(f"pip did not say where {requirement} is")
    item = found[package]
    sha256 = item.download_info.archive_info.hashes.get("sha256")
    if sha256 is None:
        raise PullError(f"the package index gives no sha256 for {requirement}")
    return Wheel(package, item.metadata.version, item.download_info.url, sha256)


def _settings() -> dict[str, str]:
    """pip's own settings by key, the environment's before the files'."""
    settings: dict[str, str] = {}
    for line in _pip("config", "list").decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in {"global", "install", ":env:"}:
            settings[key] = str(ast.literal_eval(value))
    return settings


def _pip(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - arguments are a list; names were checked when parsed
            command, capture_output=True, check=False, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise PullError(f"pip did not answer within {_PIP_TIMEOUT_S:.0f} s") from error
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace")
    if "No module named pip" in said:
        raise PullError(
            f"pip is missing in {sys.executable}, and it is what knows the package index; "
            "run `python -m ensurepip`"
        )
    raise PullError(f"pip failed: {_reason(said)}")


def _reason(said: str) -> str:
    """The sentence in pip's error output that a person would look for."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1]
