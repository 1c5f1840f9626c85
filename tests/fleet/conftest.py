"""An engine's server inside the test's own loop."""

from __future__ import annotations

import contextlib

import pytest
from link_helpers import Engine
from scripted_engine import ScriptedCore

from tokenpath.config.launch import EXIT_OK, UnixAddress
from tokenpath.protocol.errors import SpecError


@pytest.fixture
async def engine(tmp_path):
    engines = []

    def start(core=None, *, load=None, address=None, tls=None, **options) -> Engine:
        where = address or UnixAddress(tmp_path / f"s{len(engines)}")
        engines.append(Engine(core or ScriptedCore(), load, where, tls, **options))
        return engines[-1]

    yield start
    for one in engines:
        one.server.end(EXIT_OK)
        with contextlib.suppress(SpecError):
            await one.serving
