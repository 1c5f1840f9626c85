"""Handovers over TCP, with certificates on both sides."""

from __future__ import annotations

import socket
import ssl
import time

import pytest
from engine_fakes import continuation
from handover_helpers import BLOCK, SECRET, asking, decoder, prefilling, run, until
from test_handover import BLOCKS, PROMPT, falls_back
from tests.network import certificate, free_port

from tokenpath.config.launch import HandoverLaunch, TcpAddress
from tokenpath.config.replicas import Disaggregation, HandoverTls
from tokenpath.protocol.handover import PrefillPeer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two that sign themselves, ours and a stranger's."""
    folder = tmp_path_factory.mktemp("tls")
    return {name: certificate(folder, name) for name in ("ours", "stranger")}


def launch_of(pair, ca, role) -> HandoverLaunch:
    tls = HandoverTls(cert=str(pair[0]), key=str(pair[1]), ca=str(ca))
    return HandoverLaunch(role=role, settings=Disaggregation(tls=tls))


@pytest.fixture
def ours(certificates):
    pair = certificates["ours"]
    return launch_of(pair, pair[0], "both")


@pytest.fixture
def address():
    return TcpAddress("localhost", free_port())


def test_blocks_travel_over_tls(ours, address, tmp_path):
    with prefilling(tmp_path, address=address, tls=ours.server_tls(), step_s=0.005) as prefiller:
        core = decoder(tls=ours.client_tls())
        core.submit(asking(prefiller.peer, "r", PROMPT))
        result = run(core)["r"]
        assert result.token_ids == continuation(PROMPT, 8)
        assert core.stats().handover_blocks_received_total == BLOCKS
        prefiller.until_idle()
        # All of its buffer is free again.
        assert prefiller.core.giver._budget.left == 1 << 20


def test_a_small_buffer_is_used_again_and_again(ours, address, tmp_path):
    with prefilling(
        tmp_path,
        address=address,
        tls=ours.server_tls(),
        buffer_bytes=4 * 8 * BLOCK,
        step_s=0.02,
    ) as prefiller:
        core = decoder(tls=ours.client_tls())
        core.submit(asking(prefiller.peer, "r", PROMPT))
        assert run(core)["r"].token_ids == continuation(PROMPT, 8)
        assert core.stats().handover_blocks_received_total == BLOCKS


def test_a_receiver_slower_than_the_buffer_computes_the_rest(ours, address, tmp_path, caplog):
    with prefilling(
        tmp_path, address=address, tls=ours.server_tls(), buffer_bytes=3 * 8 * BLOCK
    ) as prefiller:
        giver = prefiller.core.giver
        # The sending thread is kept from sending.
        giver._names, names = lambda order: (time.sleep(0.5), names(order))[1], giver._names
        why = "the connection is slower than the prefill"
        falls_back(decoder(tls=ours.client_tls()), prefiller.peer, caplog, why, received=3)
        prefiller.until_idle()
        assert giver._budget.left == 3 * 8 * BLOCK


def test_a_stranger_gets_nothing(ours, certificates, address, tmp_path, caplog):
    stranger = launch_of(certificates["stranger"], certificates["ours"][0], "decode")
    with prefilling(tmp_path, address=address, tls=ours.server_tls()) as prefiller:
        falls_back(decoder(tls=stranger.client_tls()), prefiller.peer, caplog, "of 10 blocks")
        assert prefiller.core.stats().steps_total == 0
        assert "no TLS with its peer" in caplog.text


def test_a_prefiller_that_is_not_believed_learns_nothing(
    ours, certificates, address, tmp_path, caplog
):
    pair = certificates["stranger"]
    stranger = launch_of(pair, pair[0], "prefill")
    with prefilling(tmp_path, address=address, tls=stranger.server_tls()) as prefiller:
        core = decoder(tls=ours.client_tls())
        falls_back(core, prefiller.peer, caplog, "its certificate is not to be believed")
        assert prefiller.core.stats().steps_total == 0


def test_whoever_speaks_no_tls_is_shown_out(ours, address, tmp_path):
    with prefilling(tmp_path, address=address, tls=ours.server_tls()) as prefiller:
        with socket.create_connection(("localhost", address.port), 10) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            client.settimeout(10)
            with pytest.raises((ConnectionError, ssl.SSLError, AssertionError)):
                while True:
                    assert client.recv(4096)
        until(lambda: not prefiller.core.giver._sessions)


def test_shared_memory_is_not_for_the_network(address, tmp_path):
    """An order over TCP that announces memory is refused, not waited for."""
    from tokenpath.engine.handover.wire import Wire, WireError, connect
    from tokenpath.protocol.framing import Codec
    from tokenpath.protocol.handover import HANDOVER_VERSION, FromGiver, Greeting, Order

    with prefilling(tmp_path, address=address) as prefiller:
        wire = Wire(connect(address, None, timeout_s=5), Codec(FromGiver))
        wire.send(Greeting(HANDOVER_VERSION, SECRET), timeout_s=5)
        order = Order(
            fingerprint=bytes(range(32)), block_bytes=8 * BLOCK, token_ids=PROMPT[:40],
            first_block=0, shared=True,
        )  # fmt: skip
        wire.send(order, timeout_s=5)
        with pytest.raises(WireError):
            wire.receive(timeout_s=5, most_bytes=4096)
        wire.close()
        assert prefiller.core.stats().steps_total == 0


def test_a_wrong_secret_over_the_network(ours, address, tmp_path, caplog):
    with prefilling(tmp_path, address=address, tls=ours.server_tls()) as prefiller:
        peer = PrefillPeer(prefiller.peer.address, "guessed")
        core = decoder(tls=ours.client_tls())
        falls_back(core, peer, caplog, "ended after 0 of 10 blocks")
        assert prefiller.core.stats().steps_total == 0
