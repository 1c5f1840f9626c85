"""A client that goes away at any moment ends its work in the replica, and nothing is left over."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest
from gateway_harness import Script

PATHS = ["/v1/chat/completions", "/v1/completions"]


def _request(path: str, **fields) -> bytes:
    body = {"model": "toy", **fields}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = "x"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _leave(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_before_the_first_token(server, path, stream, n, reset):
    server.replica.script = Script(hold_first=True)
    aborted = server.replica.aborted
    connection = server.connect()
    connection.sendall(_request(path, stream=stream, n=n))
    _until(lambda: server.replica.open == n)
    left = time.monotonic()
    _leave(connection, reset=reset)
    _until(lambda: server.replica.open == 0)
    assert time.monotonic() - left < 0.5
    assert server.replica.aborted == aborted + n
    server.settle()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_in_the_middle(server, path, stream, n):
    server.replica.script = Script(endless=True, gap_s=0.01)
    aborted, sent = server.replica.aborted, server.replica.sent
    connection = server.connect()
    connection.sendall(_request(path, stream=stream, n=n))
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    _until(lambda: server.replica.sent > sent + 3 * n)
    _leave(connection, reset=False)
    _until(lambda: server.replica.open == 0)
    assert server.replica.aborted == aborted + n
    server.settle()


def test_while_sending_the_body(server):
    connection = server.connect()
    connection.sendall(_request("/v1/completions")[:-5])
    time.sleep(0.05)
    _leave(connection, reset=False)
    server.settle()
    assert server.replica.requests == []


def test_many_at_random_moments(server):
    server.replica.script = lambda request: Script(
        before_s=0.001 * (len(server.replica.requests) % 7), gap_s=0.002, endless=True
    )
    for moment in range(40):
        connection = server.connect()
        connection.sendall(_request(PATHS[moment % 2], stream=moment % 3 > 0, n=1 + moment % 2))
        time.sleep(0.0005 * (moment % 11))
        _leave(connection, reset=moment % 2 == 0)
    server.settle()
    assert server.client().models.list().data


def test_a_failing_choice_ends_its_siblings(server):
    server.replica.script = lambda request: (
        Script(fail_after=1)
        if request.request_id.endswith("-1")
        else Script(endless=True, gap_s=0.01)
    )
    aborted = server.replica.aborted
    answer = server.http.post("/v1/completions", json={"model": "toy", "prompt": "x", "n": 3})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    server.settle()
    assert server.replica.aborted == aborted + 2


def test_a_slow_reader_holds_up_nobody(server):
    """One client never reads; its tokens wait merged, and others are answered meanwhile."""
    words = ("x" * 10_000,)
    server.replica.script = lambda request: (
        Script(words=words * 900) if request.sampling.seed == 1 else Script()
    )
    sent = server.replica.sent
    connection = server.connect()
    connection.sendall(_request("/v1/completions", stream=True, seed=1, max_tokens=900))
    _until(lambda: server.replica.sent >= sent + 900)  # the replica is never held up
    assert server.client().completions.create(model="toy", prompt="x").choices
    _until(lambda: server.replica.open == 0)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 20)
    connection.close()
    assert received.count(b"x") >= 9_000_000
    assert b"data: [DONE]" in received
