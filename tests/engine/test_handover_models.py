"""The real Gemma, its prompts computed by another engine: the same ids and logprobs, bit for bit."""

from __future__ import annotations

import os
import shutil
import time

import msgspec
import pytest
from engine_fakes import Collector
from handover_helpers import run

from tokenpath.config.launch import HandoverLaunch, UnixAddress
from tokenpath.config.replicas import Disaggregation
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.engine.handover.build import shared_fingerprint
from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.kv_tiers.build import fingerprint_of
from tokenpath.engine.worker import Abort, Worker
from tokenpath.models.local import open_model
from tokenpath.protocol.handover import PrefillPeer
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

pytestmark = pytest.mark.real_model
TEXT = "The harbour master counted the ships that came in with the tide, and wrote them down. " * 7
TYPES = [
    pytest.param(
        {"dtype": "int8", "kv_dtype": kv_dtype},
        id=f"native int8, {kv_dtype} KV",
        marks=pytest.mark.skipif(native_module() is None, reason="no C++ compiler"),
    )
    for kv_dtype in ("bfloat16", "int8")
]


class Reports:
    def __init__(self):
        self.broken = None

    def progress(self, what, fraction): ...

    def loaded(self, card): ...

    def load_failed(self, error):
        self.broken = error

    def stepped(self, result): ...

    def broke(self, error):
        self.broken = error


class Desk:
    def __init__(self, worker):
        self.worker = worker

    def submit(self, ordered):
        return self.worker.submit(ordered)

    def abort(self, request_id):
        self.worker.inbox.put(Abort(request_id))


@pytest.mark.parametrize("types", TYPES)
def test_answers_are_those_of_one_engine(types, gemma_path, tmp_path):
    model = open_model(gemma_path)
    settings = EngineSettings(**types, kv_cache_tokens=2048, max_step_tokens=64, threads=1)
    address = UnixAddress(tmp_path / "give")
    giving = HandoverLaunch(role="prefill", listen=[str(address)])
    taking = HandoverLaunch(role="decode", settings=Disaggregation(min_prompt_tokens=64))
    prefiller = build_engine(model, settings, name="g", handover=giving, handover_secret="s")
    decoder = build_engine(model, settings, name="g", handover=taking)
    reports = Reports()
    worker = Worker(lambda progress: prefiller, reports)
    worker.start()
    prefiller.giver.start(Desk(worker))
    encode = model.tokenizer().encode
    wanted = [
        (TEXT + "First:", {"temperature": 0.0}),
        (TEXT[300:] + "Second:", {"temperature": 0.9, "seed": 5}),
        (TEXT[300:] + "Second:", {"temperature": 0.9, "seed": 6, "top_p": 0.8}),
        ("Short:", {"temperature": 0.0}),
        (TEXT[200:], {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 3}),
    ]

    def answers(salt, peer):
        collector = Collector()
        for number, (text, params) in enumerate(wanted):
            sampling = SamplingParams(
                **{"max_tokens": 5, "logprobs": 3, "ignore_eos": True} | params
            )
            request = GenerationRequest(
                request_id=f"{salt}{number}",
                model="g",
                prompt=TokenPrompt(encode(text)),
                sampling=sampling,
                cache_salt=salt,
            )
            decoder.submit(msgspec.structs.replace(request, prefill_at=peer))
        results = run(decoder, collector, timeout_s=60)
        return [
            (results[f"{salt}{n}"].token_ids, results[f"{salt}{n}"].logprobs)
            for n in range(len(wanted))
        ]

    handed_over = answers("theirs", PrefillPeer(str(address), "s"))
    stats = decoder.stats()
    assert stats.handovers_total >= 2
    assert stats.handover_fallbacks_total == 0
    assert stats.handover_blocks_received_total > 12
    undivided = answers("own", None)
    assert decoder.stats().handovers_total == stats.handovers_total
    assert handed_over == undivided
    worker.stop(10)
    prefiller.giver.close()
    assert reports.broken is None


def test_copies_of_a_model_understand_each_other(gemma_path, tmp_path):
    """A file's time is not part of what tells blocks of different machines apart."""
    copied = tmp_path / gemma_path.name
    shutil.copyfile(gemma_path, copied)
    os.utime(copied, (time.time(), 12345))
    ours, theirs = open_model(gemma_path), open_model(copied)

    class Copier:
        layout = "the same"

    assert shared_fingerprint(ours, Copier(), dtype="int8") == shared_fingerprint(
        theirs, Copier(), dtype="int8"
    )
    assert fingerprint_of(ours, Copier(), dtype="int8") != fingerprint_of(
        theirs, Copier(), dtype="int8"
    )
    assert shared_fingerprint(ours, Copier(), dtype="int8") != shared_fingerprint(
        ours, Copier(), dtype="int4"
    )
