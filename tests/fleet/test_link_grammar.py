"""Grammars on the replica link: compiled beside the engine's thread, refused or withdrawn alone."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from link_helpers import collect, request, tokens, until
from scripted_engine import ScriptedCore

from tokenpath.protocol.calls import CallConstraint, CallFrame, CallRule
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.events import Failed, FinishReason
from tokenpath.protocol.grammar import Grammar

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from grammar_cases import byte_vocabulary

from tokenpath.engine.grammar.compiler import GrammarCompiler


class GrammarCore(ScriptedCore):
    """Compiles for real, behind a gate; notes what it was given."""

    def __init__(self, *, closed: bool = False) -> None:
        super().__init__()
        self.gate = threading.Event()
        if not closed:
            self.gate.set()
        self.grammars = GrammarCompiler(self._vocabulary, limit_s=20, cache_entries=8)
        self.given: dict[str, object] = {}

    def _vocabulary(self):
        assert self.gate.wait(20)
        return byte_vocabulary()

    def submit(self, request, *, arrived, grammar=None) -> None:
        self.given[request.request_id] = grammar
        super().submit(request, arrived=arrived)


def constrained(request_id: str, pattern: str = "a+", **kwargs):
    plain = request(request_id, **kwargs)
    sampling = msgspec.structs.replace(plain.sampling, grammar=Grammar.regex(pattern))
    return msgspec.structs.replace(plain, sampling=sampling)


async def test_a_compiled_grammar_reaches_the_core_with_its_request(engine):
    core = GrammarCore()
    link = await engine(core).ready()
    events = await collect(link, constrained("r"))
    assert tokens(events) == [1000 + i for i in range(5)]
    (given,) = core.given.values()
    assert given is core.grammars.compile(Grammar.regex("a+"))


async def test_a_bad_grammar_fails_its_own_request_only(engine):
    started = engine(GrammarCore())
    link = await started.ready()
    bad, good, plain = await asyncio.gather(
        collect(link, constrained("bad", "(")),
        collect(link, constrained("good")),
        collect(link, request("plain")),
    )
    (failed,) = bad
    assert isinstance(failed, Failed)
    assert failed.error.code == InvalidRequestError.code
    assert failed.error.param == "regex"
    assert "unclosed group" in failed.error.message
    assert failed.stages.queue_s > 0
    assert tokens(good) == tokens(plain)
    await started.idle()


async def test_a_strict_schema_is_refused_by_the_field_of_its_tool(engine):
    link = await engine(GrammarCore()).ready()
    rule = CallRule("f", {"not": {}}, strict=True, field="tools[3].function.parameters")
    grammar = Grammar.calls(
        CallConstraint(frames=(CallFrame((rule,)),), required=True, several=False)
    )
    plain = request("r")
    sampling = msgspec.structs.replace(plain.sampling, grammar=grammar)
    (failed,) = await collect(link, msgspec.structs.replace(plain, sampling=sampling))
    assert isinstance(failed, Failed)
    assert failed.error.param == rule.field
    assert failed.error.message.startswith(f"Field '{rule.field}' cannot be enforced: ")


async def test_others_run_while_a_grammar_is_compiled(engine):
    core = GrammarCore(closed=True)
    started = engine(core)
    link = await started.ready()
    waiting = asyncio.ensure_future(collect(link, constrained("slow")))
    for index in range(5):
        assert len(tokens(await collect(link, request(f"r{index}")))) == 5
    assert not waiting.done()
    core.gate.set()
    events = await waiting
    assert len(tokens(events)) == 5
    assert events[-1].finish.stages.queue_s > 0.001
    await started.idle()


async def test_a_request_is_withdrawn_while_its_grammar_is_compiled(engine):
    core = GrammarCore(closed=True)
    started = engine(core)
    link = await started.ready()
    waiting = asyncio.ensure_future(collect(link, constrained("gone")))
    other = asyncio.ensure_future(collect(link, constrained("stays")))
    await until(lambda: len(started.server._live) == 2)
    link.abort("gone")
    (event,) = await waiting
    assert event.finish.reason is FinishReason.ABORT
    assert event.finish.usage.completion_tokens == 0
    assert event.finish.usage.prompt_tokens == 1
    core.gate.set()
    assert len(tokens(await other)) == 5
    await started.idle()
    assert len(core.given) == 1


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_connection_that_ends_takes_its_uncompiled_requests_along(engine, at_once):
    core = GrammarCore(closed=True)
    started = engine(core)
    link = await started.ready()
    waiting = asyncio.ensure_future(collect(link, constrained("gone")))
    if not at_once:
        await until(lambda: started.server._live)
    else:
        await asyncio.sleep(0)
    await link.close()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: not started.server._live)
    core.gate.set()
    link = await started.ready()
    assert len(tokens(await collect(link, constrained("next")))) == 5
    await started.idle()


async def test_a_drain_ends_what_is_still_compiled(engine):
    core = GrammarCore(closed=True)
    started = engine(core)
    link = await started.ready()
    waiting = asyncio.ensure_future(collect(link, constrained("late")))
    await until(lambda: started.server._live)
    assert await started.server.drain(0.05) == 1
    (failed,) = await waiting
    assert isinstance(failed, Failed)
    assert failed.error.code == "draining"
    core.gate.set()
    assert not core.given
