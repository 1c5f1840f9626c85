"""A call that ends before its output does is accounted for like any other.

Whether the client left, the deadline passed, the server shut down or a sibling failed: the line has
the engine's stages and the engine's count of tokens, nearly nothing is unattributed, and nobody
waits noticeably longer for it.
"""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest
from gateway_harness import Log, Script, Served, serving

from tokenpath.gateway.execute import LAST_EVENTS_S
from tokenpath.gateway.lifeline import LAST_WORDS_S

BODY = {"model": "toy", "prompt": "my secret words"}
LOST_MS = 200
"""What may be unattributed on a busy machine. Without the engine's stages it would be 300 and more."""


def send(server: Served, **fields) -> socket.socket:
    data = json.dumps(BODY | fields).encode()
    connection = server.connect()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def leave(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


def accounted(log: Log) -> dict:
    """The next line, whose stages explain nearly all of its time."""
    line = log.next()
    assert 0 <= line["stages"]["unattributed"] < LOST_MS, line
    assert sum(line["stages"].values()) == pytest.approx(line["wall_ms"], abs=0.02)
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_request_is_queued(server, log, stream):
    server.replica.script = Script(hold_first=True, cached=None)
    connection = send(server, stream=stream)
    until(lambda: server.replica.open)
    time.sleep(0.3)
    leave(connection)
    line = accounted(log)
    assert (line["status"], line["outcome"], line["error"]) == (499, "disconnected", "cancelled")
    assert line["stages"]["queue"] > 250
    assert "prefill" not in line["stages"]
    assert "decode" not in line["stages"]
    assert (line["in"], line["out"]) == (16, 0)
    assert "ttft_ms" not in line


def test_a_client_that_leaves_in_prefill(server, log):
    server.replica.script = Script(before_s=0.1, prefill_s=60)
    connection = send(server)
    until(lambda: server.replica.open)
    time.sleep(0.4)
    leave(connection)
    line = accounted(log)
    assert line["stages"]["queue"] > 90
    assert line["stages"]["prefill"] > 200
    assert "decode" not in line["stages"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_in_the_middle(server, log, stream, n):
    server.replica.script = Script(
        before_s=0.05, prefill_s=0.05, endless=True, gap_s=0.01, hidden=7
    )
    sent = server.replica.sent
    connection = send(server, stream=stream, n=n)
    until(lambda: server.replica.sent > sent + 20 * n)
    leave(connection)
    line = accounted(log)
    assert line["outcome"] == "disconnected"
    assert line["stages"]["queue"] > 40
    assert line["stages"]["prefill"] > 40
    assert line["stages"]["decode"] > 150
    # The engine's own count: tokens that were never shown, and those that came too late, are in it.
    server.settle()
    # One a choice may be counted and, because it is withdrawn just then, not sent.
    counted = server.replica.sent - sent - n + 7 * n
    assert counted <= line["out"] <= counted + n
    assert line["cached"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_keeps_the_stages_and_delays_nothing(log, stream):
    with serving(limits={"request_s": 0.4}) as server:
        server.replica.script = Script(before_s=0.1, prefill_s=60)
        answer = server.http.post("/v1/completions", json={**BODY, "stream": stream})
        assert answer.status_code == 504
        line = accounted(log)
        # Timers may fire a little before their time on the wall.
        assert 395 <= line["wall_ms"] < 400 + LOST_MS
        assert (line["outcome"], line["error"]) == ("failed", "deadline_exceeded")
        assert line["stages"]["queue"] > 90
        assert line["stages"]["prefill"] > 200
        server.settle()


def test_the_engines_own_deadline_keeps_the_stages(server, log):
    server.replica.script = Script(
        before_s=0.2, endless=True, gap_s=0.02, fail_after=10, fails_with_stages=True, hidden=5
    )
    assert server.http.post("/v1/completions", json=BODY).status_code == 500
    line = accounted(log)
    assert line["stages"]["queue"] > 190
    assert line["stages"]["decode"] > 150
    assert line["out"] == 15


def test_a_failing_choice_leaves_the_account_of_the_sibling_that_ended_last(server, log):
    server.replica.script = lambda request: (
        Script(before_s=0.3, fail_after=1)
        if request.request_id.endswith("-1")
        else Script(endless=True, gap_s=0.01, before_s=0.05, hidden=100)
    )
    answer = server.http.post("/v1/completions", json={**BODY, "n": 3})
    assert answer.status_code == 500
    line = accounted(log)
    assert 300 <= line["wall_ms"] < 300 + LOST_MS
    assert line["error"] == "engine_error"
    assert line["stages"]["queue"] > 40
    assert line["stages"]["decode"] > 200
    assert line["out"] > 200


def test_a_shutdown_keeps_the_stages(log):
    with serving() as server:
        server.replica.script = Script(endless=True, gap_s=0.01, before_s=0.1)
        connection = send(server, stream=True)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(0.2)
        assert server.call(server.app.draining.drain(0.05)) == 1
        line = accounted(log)
        assert (line["outcome"], line["error"]) == ("failed", "draining")
        assert line["stages"]["queue"] > 90
        assert line["stages"]["decode"] > 150
        connection.close()


def test_a_replica_that_does_not_answer_is_waited_for_a_moment_only(log):
    assert LAST_EVENTS_S <= LAST_WORDS_S / 2
    with serving(limits={"request_s": 0.2}) as server:
        server.replica.script = Script(hold_first=True, deaf=True)
        assert server.http.post("/v1/completions", json={**BODY, "n": 2}).status_code == 504
        server.settle()
        assert server.replica.aborted == 2
        line = log.next()
        least = 1_000 * (0.2 + LAST_EVENTS_S)
        assert least <= line["wall_ms"] < least + 500
        assert "queue" not in line["stages"]
        assert line["stages"]["unattributed"] > 1_000


def test_the_clients_reading_of_the_error_is_flush(log):
    with serving(limits={"request_s": 0.4}) as server:
        server.replica.script = Script(words=("x" * 50_000,) * 900, gap_s=0.001)
        connection = send(server, stream=True, max_tokens=900)
        line = log.next()
        assert line["error"] == "deadline_exceeded"
        assert line["stages"]["decode"] > 200
        assert line["stages"]["flush"] > 1_000  # the last words, which it never reads
        assert 0 <= line["stages"]["unattributed"] < LOST_MS
        connection.close()
        server.settle()


def test_tokens_after_the_client_left_are_not_latency(server, log):
    """They count as generated, and neither as a first token nor as gaps that a client waited."""
    server.replica.script = Script(before_s=0.2, endless=True, gap_s=0.001, deaf=True)
    connection = send(server)
    until(lambda: server.replica.open)
    leave(connection)
    line = log.next()
    assert "ttft_ms" not in line
    assert line["out"] > 0
    server.settle()
