"""The rehearsal before ready: it computes, and leaves nothing behind."""

import logging
import sys

import pytest
from engine_fakes import Poisoned, make_core
from test_structured import make_model
from tests.engine.encoders import ENCODERS, made, saved

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.engine.pooling.build import build_pooling_engine
from tokenpath.engine.warm_up import rehearse
from tokenpath.models.local import open_model
from tokenpath.models.servable import open_servable
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.replica import ReplicaStats


def test_a_model_that_cannot_compute_is_not_ready():
    core = make_core(wrap=lambda runner: Poisoned(runner, lambda _: True, ValueError("broken")))
    with pytest.raises(EngineError, match="failed its warm-up"):
        rehearse(core)


def test_what_fits_is_rehearsed():
    for tokens in (3, 4, 8, 1000):
        core = make_core(max_context_tokens=tokens, num_blocks=64)
        seen = []
        rehearse(core, lambda what, fraction, seen=seen: seen.append((what, fraction)))
        assert not core.has_work()
        assert bool(seen) == (tokens > 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(make_model("byte level", tmp_path_factory.mktemp("model")))


def test_the_serving_core_knows_nothing_of_it_but_its_vocabulary_is_made(model, monkeypatch):
    settings = EngineSettings(
        threads=1, dtype="float32", kv_cache_tokens=512, kv_tiers={"host_bytes": 1 << 22}
    )
    core = build_engine(model, settings, name="m", warm=True)
    assert core.stats().counted() == ReplicaStats()
    assert core.stats().kv_blocks_cached == 0
    assert core.grammars.cached == 0
    core.check_integrity()
    # Whatever a first schema needs has been made: a second vocabulary would ask for it again.
    monkeypatch.setitem(sys.modules, "tokenpath.engine.grammar.vocabulary", None)
    assert core.grammars.compile(Grammar.json_object()) is not None
    cold = build_engine(model, settings, name="m")
    with pytest.raises(EngineError):
        cold.grammars.compile(Grammar.json_object())


def test_a_schema_that_cannot_be_rehearsed_is_a_warning(model, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenpath.engine.grammar.vocabulary", None)
    settings = EngineSettings(threads=1, dtype="float32", kv_cache_tokens=512)
    with caplog.at_level(logging.WARNING):
        build_engine(model, settings, name="m", warm=True)
    assert "the first schema was not rehearsed" in caplog.text


def test_a_pooling_model_reads_an_input_first(tmp_path):
    folder = saved(made(next(iter(ENCODERS.values()))), tmp_path)
    seen = []
    core = build_pooling_engine(
        open_servable(folder),
        EngineSettings(threads=1),
        name="toy",
        warm=True,
        progress=lambda *step: seen.append(step),
    )
    assert seen[-1] == ("warming up", 1.0)
    assert core.stats().counted() == ReplicaStats()
