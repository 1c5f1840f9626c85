"""Servers for the gateway's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from gateway_harness import Log, Script, Served, serving


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def server(module_server: Served) -> Iterator[Served]:
    """A shared server with the default limits and a fresh script; checked for leaks after."""
    module_server.replica.script = Script()
    module_server.replica.requests.clear()
    yield module_server
    module_server.settle()


@pytest.fixture
def log():
    log = Log()
    logger = logging.getLogger("tokenpath")
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler in log.handlers:
        logger.addHandler(handler)
    yield log
    for handler in log.handlers:
        logger.removeHandler(handler)
    logger.setLevel(before)
    assert "secret" not in log.text
