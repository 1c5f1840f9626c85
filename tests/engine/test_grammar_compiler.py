"""The compiler of grammars: once for all who ask, within a time, and bounded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from grammar_cases import ENDS, byte_vocabulary

from tokenpath.engine.grammar import compiler as module
from tokenpath.engine.grammar.compiler import GrammarCompiler
from tokenpath.protocol.errors import EngineError, InvalidRequestError, OverloadedError
from tokenpath.protocol.grammar import Grammar


def make(*, limit_s=20.0, cache_entries=4, vocabulary=byte_vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, limit_s=limit_s, cache_entries=cache_entries)


class Gate:
    """Stands in for the vocabulary: the first compilations wait until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(20)
        return byte_vocabulary()


def test_the_same_grammar_is_compiled_once():
    compiler = make()
    first = compiler.compile(Grammar.regex("a+"))
    assert compiler.compile(Grammar.regex("a+", field="guided_regex")) is first
    assert compiler.compile(Grammar.choice(["a+"])) is not first
    assert (compiler.compiled_total, compiler.hits_total, compiler.cached) == (2, 1, 2)
    assert compiler.compile_seconds_total > 0
    assert first.begin(ENDS).tokens == 0


def test_the_least_recently_used_grammar_goes():
    compiler = make(cache_entries=2)
    a = compiler.compile(Grammar.regex("a"))
    b = compiler.compile(Grammar.regex("b"))
    assert compiler.compile(Grammar.regex("a")) is a
    compiler.compile(Grammar.regex("c"))
    assert compiler.cached == 2
    assert compiler.compile(Grammar.regex("a")) is a
    assert compiler.compile(Grammar.regex("b")) is not b


def test_a_refusal_is_kept_and_names_each_requests_own_field():
    compiler = make()
    for field in ("guided_regex", "structured_outputs.regex"):
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            compiler.compile(Grammar.regex("(", field=field))
        assert caught.value.param == field
    assert (compiler.compiled_total, compiler.hits_total) == (1, 1)


def test_a_failure_of_the_engine_is_not_kept():
    broken = [True]

    def vocabulary():
        if broken[0]:
            raise MemoryError
        return byte_vocabulary()

    compiler = make(vocabulary=vocabulary)
    with pytest.raises(EngineError, match="failed while it compiled"):
        compiler.compile(Grammar.regex("a"))
    broken[0] = False
    compiler.compile(Grammar.regex("a"))
    assert compiler.cached == 1


async def test_many_who_ask_at_once_wait_for_one_compilation():
    gate = Gate()
    compiler = make(vocabulary=gate)
    asked = [asyncio.ensure_future(compiler.ready(Grammar.regex("a"))) for _ in range(50)]
    await asyncio.to_thread(gate.entered.wait)
    asked[0].cancel()
    await asyncio.sleep(0)
    gate.opened.set()
    cancelled, *made = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert len({id(one) for one in made}) == 1
    assert (compiler.compiled_total, compiler.hits_total) == (1, 49)


async def test_the_loop_runs_while_a_grammar_is_compiled():
    gate = Gate()
    asked = asyncio.ensure_future(make(vocabulary=gate).ready(Grammar.regex("a")))
    turns = 0
    while turns < 100:
        await asyncio.sleep(0)
        turns += 1
    assert not asked.done()
    gate.opened.set()
    await asked


@pytest.mark.parametrize("wait", ["thread", "loop"])
async def test_what_takes_too_long_is_refused_and_the_others_asked_to_come_back(wait):
    gate = Gate()
    compiler = make(limit_s=0.3, vocabulary=gate)

    async def ask(pattern):
        grammar = Grammar.regex(pattern, field="guided_regex")
        if wait == "loop":
            return await compiler.ready(grammar)
        return await asyncio.to_thread(compiler.compile, grammar)

    slow = [asyncio.ensure_future(ask(f"slow{i}")) for i in range(module.THREADS)]
    await asyncio.sleep(0.05)
    behind = asyncio.ensure_future(ask("behind"))
    for one in slow:
        with pytest.raises(InvalidRequestError, match=r"'guided_regex' takes longer than 0.3 sec"):
            await one
    with pytest.raises(OverloadedError, match="other grammars are being compiled"):
        await behind
    gate.opened.set()
    while compiler.cached < 3:
        await asyncio.sleep(0.01)
    await ask("behind")


async def test_too_many_waiting_grammars_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    gate = Gate()
    compiler = make(vocabulary=gate)
    asked = [asyncio.ensure_future(compiler.ready(Grammar.regex(f"a{i}"))) for i in range(10)]
    await asyncio.sleep(0.1)
    gate.opened.set()
    made = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in made if isinstance(one, OverloadedError)]
    assert len(made) - len(refused) >= 3
    assert refused
    assert "wait to be compiled" in refused[0].message


def test_a_grammar_that_has_used_up_its_work_is_compiled_anew():
    compiler = make()
    first = compiler.compile(Grammar.regex("a+"))
    first.spent = True
    second = compiler.compile(Grammar.regex("a+"))
    assert second is not first
    assert not second.spent


def test_threads_end_when_nothing_waits():
    compiler = make()
    for index in range(5):
        compiler.compile(Grammar.regex(f"x{index}"))
    deadline = time.monotonic() + 5
    while any(thread.name == "grammar" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_without_grammars_does_not_load_the_library():
    code = "import sys, tokenpath.engine.core, tokenpath.engine.build; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
