"""Prompts that another engine computes: the same answers as undivided, whatever goes wrong."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time

import msgspec
import pytest
from engine_fakes import VOCAB, Collector, continuation
from handover_helpers import (
    BLOCK,
    SECRET,
    asking,
    decoder,
    prefilling,
    run,
    settled,
    until,
)
from test_kv_tiers_core import tiers_of

from tokenpath.config.launch import UnixAddress
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.policy.tiers import Costs
from tokenpath.protocol.handover import PrefillPeer


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


PROMPT = prompt_of(42)
BLOCKS = 10
"""Whole ones of it."""


def test_another_engine_computes_the_prompt_and_its_blocks_join_the_prefix_cache(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder()
        core.submit(asking(prefiller.peer, "r", PROMPT))
        result = run(core)["r"]
        assert result.token_ids == continuation(PROMPT, 8)
        stats = core.stats()
        assert stats.handover_blocks_received_total == BLOCKS
        assert stats.handover_bytes_received_total == BLOCKS * 8 * BLOCK
        assert (stats.handovers_total, stats.handover_fallbacks_total) == (1, 0)
        assert result.finish.usage.cached_prompt_tokens == BLOCKS * BLOCK
        assert result.finish.stages.kv_transfer_s > 0
        prefiller.until_idle()
        given = prefiller.core.stats()
        assert given.handover_blocks_given_total == BLOCKS
        assert given.kv_blocks_used == 0
        # Again: the blocks are in the pool, and nobody is asked.
        core.submit(asking(prefiller.peer, "again", PROMPT))
        assert run(core)["again"].token_ids == continuation(PROMPT, 8)
        assert core.stats().handovers_total == 1
        # Longer, with enough that is new: only that is ordered.
        longer = PROMPT + prompt_of(20, seed=2)
        core.submit(asking(prefiller.peer, "longer", longer))
        result = run(core)["longer"]
        assert result.token_ids == continuation(longer, 8)
        stats = core.stats()
        assert stats.handovers_total == 2
        assert stats.handover_blocks_received_total < BLOCKS + len(longer) // BLOCK - BLOCKS + 1


def test_blocks_are_given_while_the_prefill_still_runs(tmp_path):
    with prefilling(tmp_path, step_s=0.02) as prefiller:
        core = decoder()
        core.submit(asking(prefiller.peer, "r", PROMPT))
        core.step()
        (incoming,) = core._tiers._incoming
        seen = set()
        while incoming.fetch.ended_at is None:
            seen.add(incoming.fetch.arrived)
            time.sleep(0.001)
        # Two blocks a step of eight tokens.
        assert {2, 4, 6, 8} <= seen
        assert core.stats().requests_waiting == 1
        assert core.stats().kv_blocks_used == 0
        assert run(core)["r"].token_ids == continuation(PROMPT, 8)


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_prompts_is_answered_as_undivided(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(KvTiers, "costs", lambda self: Costs(None))
    rng = random.Random(seed)
    beginnings = [prompt_of(rng.randrange(1, 60), seed=rng.random()) for _ in range(5)]
    # A pool and tiers so small that blocks come and go, a buffer for two prompts, slots for few.
    inner = tiers_of(tmp_path / "kv", host=12) if seed else None
    with prefilling(tmp_path, num_blocks=24) as prefiller:
        core = decoder(
            num_blocks=28, inner=inner, buffer_bytes=30 * 8 * BLOCK, step=3, max_running=4
        )
        asked, collector = {}, Collector()
        for number in range(50):
            tail = prompt_of(rng.randrange(1, 20), seed=rng.random())
            prompt = rng.choice(beginnings) + tail
            for choice in range(rng.choice([1, 1, 2])):
                name = f"{number}.{choice}"
                asked[name] = prompt
                peer = prefiller.peer if rng.random() < 0.8 else None
                core.submit(asking(peer, name, prompt, max_tokens=6))
            for _ in range(rng.randrange(4)):
                collector.take(core.step())
                core.check_integrity()
        run(core, collector)
        for name, prompt in asked.items():
            assert collector.results[name].token_ids == continuation(prompt, 6)
        assert core.stats().handover_blocks_received_total > 50
        prefiller.until_idle()
        core.close()


def test_choices_of_one_prompt_are_one_handover(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder()
        for name in "abc":
            core.submit(asking(prefiller.peer, name, PROMPT, seed=1))
        results = run(core)
        assert [results[name].token_ids for name in "abc"] == [continuation(PROMPT, 8)] * 3
        assert core.stats().handover_blocks_received_total == BLOCKS


def test_the_other_choice_goes_on_when_the_first_is_withdrawn(tmp_path):
    with prefilling(tmp_path) as prefiller:
        prefiller.slow.gate.clear()
        core = decoder()
        for name in "ab":
            core.submit(asking(prefiller.peer, name, PROMPT))
        core.step()
        core.abort("a")
        prefiller.slow.gate.set()
        assert run(core)["b"].token_ids == continuation(PROMPT, 8)
        assert core.stats().handover_blocks_received_total == BLOCKS


def test_short_and_mostly_cached_prompts_stay(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder(min_tokens=24)
        core.submit(asking(prefiller.peer, "short", PROMPT[:24]))
        run(core)
        core.submit(asking(prefiller.peer, "cached", PROMPT[:24] + prompt_of(20, seed=3)))
        run(core)
        assert core.stats().handovers_total == 0
        assert core.stats().handover_fallbacks_total == 0


def test_salts_keep_their_blocks_apart(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder()
        for salt in ("one", "two"):
            wanted = asking(prefiller.peer, salt, PROMPT)
            core.submit(msgspec.structs.replace(wanted, cache_salt=salt))
            result = run(core)[salt]
            assert result.token_ids == continuation(PROMPT, 8)
        assert core.stats().handover_blocks_received_total == 2 * BLOCKS
        assert prefiller.core.stats().cached_prompt_tokens_total == 0


def test_a_prompt_with_an_adapter_stays(tmp_path):
    # Its name means other weights in another process.
    core = decoder()
    wanted = asking(PrefillPeer(f"unix:{tmp_path}", SECRET), "r", PROMPT)
    core._tiers.expect(msgspec.structs.replace(wanted, adapter="a"))
    assert not core._tiers._expected


# What goes wrong ends in computing, and leaves nothing behind.


def test_a_withdrawn_request_frees_both_sides(tmp_path):
    with prefilling(tmp_path) as prefiller:
        prefiller.slow.gate.clear()
        core = decoder()
        core.submit(asking(prefiller.peer, "r", PROMPT))
        core.step()
        assert prefiller.slow.entered.wait(10)
        core.abort("r")
        settled(core)
        until(lambda: not prefiller.core.giver._ordered)
        prefiller.slow.gate.set()
        prefiller.until_idle()
        assert prefiller.core.stats().aborts_total == 1
        assert core._tiers._budget.left == 1 << 20
        assert core.stats().handover_fallbacks_total == 0


def falls_back(core, peer, caplog, why, *, received=0):
    core.submit(asking(peer, "r", PROMPT))
    result = run(core)["r"]
    assert result.token_ids == continuation(PROMPT, 8)
    stats = core.stats()
    assert stats.handover_blocks_received_total == received
    assert stats.handover_fallbacks_total == 1
    assert why in caplog.text
    assert result.finish.usage.cached_prompt_tokens == received * BLOCK


def test_nobody_there(tmp_path, caplog):
    caplog.set_level("INFO", "tokenpath")
    core = decoder()
    peer = PrefillPeer(f"unix:{tmp_path / 'nobody'}", SECRET)
    falls_back(core, peer, caplog, "No such file")
    # Not asked again at once.
    core.submit(asking(peer, "next", prompt_of(40, seed=8)))
    run(core)
    assert core.stats().handovers_total == 1
    assert "could not be reached" in caplog.text


def test_wrong_secret(tmp_path, caplog):
    with prefilling(tmp_path) as prefiller:
        peer = PrefillPeer(prefiller.peer.address, "guessed")
        falls_back(decoder(), peer, caplog, "the secret is wrong")
        assert "guessed" not in caplog.text
        assert prefiller.core.stats().steps_total == 0


def test_another_model(tmp_path, caplog):
    with prefilling(tmp_path, fingerprint=bytes(32)) as prefiller:
        falls_back(decoder(), prefiller.peer, caplog, "another model, number type")


def test_another_block_size(tmp_path, caplog):
    with prefilling(tmp_path, block_tokens=8) as prefiller:
        falls_back(decoder(), prefiller.peer, caplog, "another model, number type, block size")


def test_the_prefilling_pool_is_too_small(tmp_path, caplog):
    with prefilling(tmp_path, num_blocks=4) as prefiller:
        falls_back(decoder(), prefiller.peer, caplog, "prompt and output together may have")


def test_too_slow(tmp_path, caplog):
    with prefilling(tmp_path) as prefiller:
        prefiller.slow.gate.clear()
        falls_back(decoder(wait_s=0.1), prefiller.peer, caplog, "it took longer than 0.1 s")
        prefiller.slow.gate.set()
        prefiller.until_idle()


def test_what_came_before_the_limit_is_used(tmp_path, caplog):
    with prefilling(tmp_path) as prefiller:
        core = decoder(wait_s=0.5)
        copied = prefiller.copier.read

        def read(block, to):
            copied(block, to)
            prefiller.slow.gate.clear()

        prefiller.copier.read = read
        falls_back(core, prefiller.peer, caplog, "ended after 2 of 10 blocks", received=2)
        prefiller.copier.read = copied
        prefiller.slow.gate.set()
        prefiller.until_idle()


def test_shutting_down(tmp_path, caplog):
    with prefilling(tmp_path) as prefiller:
        prefiller.core.giver.refuse()
        falls_back(decoder(), prefiller.peer, caplog, "the replica is shutting down")


def test_a_damaged_block_is_computed_again(tmp_path, caplog):
    with prefilling(tmp_path) as prefiller:
        core = decoder()
        core.submit(asking(prefiller.peer, "r", PROMPT))
        core.step()
        (incoming,) = core._tiers._incoming
        until(lambda: incoming.fetch.ended_at is not None)
        incoming.fetch.row(3)[5] ^= 1
        result = run(core)["r"]
        assert result.token_ids == continuation(PROMPT, 8)
        assert result.finish.usage.cached_prompt_tokens == 3 * BLOCK
        assert core.stats().kv_corrupt_blocks_total == 1
        assert "is damaged" in caplog.text


def test_no_room_to_receive(tmp_path, caplog):
    caplog.set_level("INFO", "tokenpath")
    with prefilling(tmp_path) as prefiller:
        falls_back(decoder(buffer_bytes=8), prefiller.peer, caplog, "no room to receive")


def test_room_for_a_part(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder(buffer_bytes=4 * 8 * BLOCK)
        core.submit(asking(prefiller.peer, "r", PROMPT))
        result = run(core)["r"]
        assert result.token_ids == continuation(PROMPT, 8)
        assert result.finish.usage.cached_prompt_tokens == 4 * BLOCK


def test_the_pool_is_full_of_others(tmp_path):
    with prefilling(tmp_path) as prefiller:
        core = decoder(num_blocks=16, max_running=4)
        collector = Collector()
        core.submit(asking(None, "other", prompt_of(30, seed=5), max_tokens=30))
        core.submit(asking(prefiller.peer, "r", PROMPT))
        run(core, collector)
        assert collector.results["r"].token_ids == continuation(PROMPT, 8)
        assert collector.results["other"].token_ids == continuation(prompt_of(30, seed=5), 30)


class Impostor:
    """Accepts connections and does with each what the test says."""

    def __init__(self, path, talk):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.peer = PrefillPeer(str(UnixAddress(path)), SECRET)
        self.thread = threading.Thread(target=self._run, args=(talk,), daemon=True)
        self.thread.start()

    def _run(self, talk):
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(10)
            talk(connection)

    def close(self):
        self.thread.join(10)
        self.listener.close()
        assert not self.thread.is_alive()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "closed the connection"),
        (framed(b"GET / HTTP/1.1"), "no frame of a handover"),
        (b"\xff\xff\xff\xff", "longer than"),
        (framed(b"\x81")[:-1], "closed the connection"),
        # A block's announcement with a header of zeros.
        (framed(b"\x82\xa4type\xa5given\xa4seal\xc4\xf0" + bytes(240)), "header is damaged"),
    ],
)
def test_a_peer_that_talks_nonsense(sent, why, tmp_path, caplog):
    def talk(connection):
        connection.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while connection.recv(1 << 16):
                pass
        connection.sendall(sent)

    impostor = Impostor(tmp_path / "peer", talk)
    falls_back(decoder(), impostor.peer, caplog, why)
    impostor.close()


def test_a_peer_that_falls_silent(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("tokenpath.engine.handover.fetch.SILENCE_S", 0.1)
    impostor = Impostor(tmp_path / "peer", lambda connection: time.sleep(0.3))
    falls_back(decoder(), impostor.peer, caplog, "did not answer in time")
    impostor.close()


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0\0\1\xff", framed(os.urandom(100)), b"\x7f\xff\xff\xff"]
)
def test_whoever_orders_nonsense_is_shown_out(sent, tmp_path):
    with prefilling(tmp_path) as prefiller:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(prefiller.address.path))
            client.settimeout(10)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert len(client.recv(4096)) < 100
        until(lambda: not prefiller.core.giver._sessions)
        core = decoder()
        core.submit(asking(prefiller.peer, "r", PROMPT))
        assert run(core)["r"].token_ids == continuation(PROMPT, 8)
