"""Limits while reading, waiting and running: each ends the call at once, with its own status."""

from __future__ import annotations

import json
import socket
import time

import openai
import pytest
from gateway_harness import Script, serving

from tokenpath.protocol.replica import ReplicaState, ReplicaStats

BODY = {"model": "toy", "prompt": "x"}


def head(path: str = "/v1/completions", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def answer_on(connection: socket.socket) -> tuple[int, dict]:
    """Status and JSON body of the next answer."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline().strip()) != b"":
            name, _, value = line.partition(b": ")
            if name.lower() == b"content-length":
                length = int(value)
        return status, json.loads(file.read(length))


def test_a_large_body_is_refused_by_its_announced_length():
    with serving(limits={"body_bytes": 1_000}) as server, server.connect() as connection:
        connection.sendall(head(Content_Length="50000000", Expect="100-continue"))
        started = time.monotonic()
        status, body = answer_on(connection)
        assert time.monotonic() - started < 1  # and no "100 Continue" came first
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert "1000 bytes" in body["error"]["message"]


def test_a_large_chunked_body_is_refused_once_it_crosses_the_limit():
    with serving(limits={"body_bytes": 1_000}) as server, server.connect() as connection:
        connection.sendall(head(Transfer_Encoding="chunked"))
        connection.sendall(b"3e8\r\n" + b" " * 1_000 + b"\r\n")
        time.sleep(0.05)
        connection.sendall(b"1\r\n \r\n")
        status, body = answer_on(connection)
        assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_a_client_that_sends_50_mb_gets_its_413(server):
    answer = server.http.post("/v1/completions", content=b" " * 50_000_000)
    assert answer.status_code == 413
    assert server.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_client_that_reads_only_when_all_is_sent_gets_its_413():
    with serving(limits={"body_bytes": 1_000}) as server, server.connect() as connection:
        connection.sendall(head(Content_Length="8000000") + b" " * 8_000_000)
        status, body = answer_on(connection)
        assert (status, body["error"]["code"]) == (413, "body_too_large")


def test_a_large_body_that_never_ends_is_answered_all_the_same():
    with serving(limits={"body_bytes": 1_000}) as server, server.connect() as connection:
        connection.sendall(head(Content_Length="50000000") + b" " * 2_000)
        status, _ = answer_on(connection)
        assert status == 413


def test_a_slow_body_is_given_up():
    with serving(body_s=0.2) as server, server.connect() as connection:
        connection.sendall(head(Content_Length="100") + b"{")
        status, body = answer_on(connection)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert connection.recv(1) == b""
        server.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_before_output_is_a_504(stream):
    with serving(limits={"request_s": 0.2}) as server:
        server.replica.script = Script(hold_first=True)
        started = time.monotonic()
        answer = server.http.post("/v1/completions", json={**BODY, "stream": stream})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() - started < 2
        server.settle()
        assert server.replica.aborted == 1
        assert 0 < server.replica.requests[0].timeout_s <= 0.2


def test_the_deadline_after_output():
    with serving(limits={"request_s": 0.3}) as server:
        server.replica.script = Script(endless=True, gap_s=0.02)
        stream = server.client().completions.create(**BODY, stream=True)
        texts = []
        with pytest.raises(openai.APIError) as caught:
            texts.extend(chunk.choices[0].text for chunk in stream)
        assert caught.value.body["code"] == "deadline_exceeded"
        answer = server.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 504
        server.settle()


def test_a_reader_that_never_reads_is_cut_at_the_deadline():
    with serving(limits={"request_s": 0.3}) as server, server.connect() as connection:
        server.replica.script = Script(words=("x" * 50_000,) * 900)
        body = json.dumps({**BODY, "stream": True, "max_tokens": 900}).encode()
        connection.sendall(head(Content_Length=str(len(body))) + body)
        time.sleep(0.4)
        server.settle(seconds=5)


def test_keepalive_commits_to_200_and_then_errors_are_events():
    with serving(keepalive_s=0.05) as server:
        server.replica.script = Script(before_s=0.2)
        answer = server.http.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.text.startswith(": keep-alive\n\n: keep-alive\n\n")
        assert answer.text.endswith("data: [DONE]\n\n")
        server.replica.script = Script(before_s=0.12, fail_after=0)
        answer = server.http.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.status_code == 200
        assert json.loads(answer.text.split("data: ")[1])["error"]["code"] == "engine_error"
        assert "[DONE]" not in answer.text
        server.replica.script = Script()
        answer = server.http.post("/v1/completions", json={**BODY, "stream": True})
        assert "keep-alive" not in answer.text


def test_the_stream_has_its_headers(server):
    answer = server.http.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"


def test_a_full_queue_answers_at_once_with_retry_after():
    with serving(limits={"queued_requests": 2}, max_running=1) as server:
        server.replica.script = Script(hold_first=True)
        waiting = []
        for _ in range(3):
            connection = server.connect()
            data = json.dumps(BODY).encode()
            connection.sendall(head(Content_Length=str(len(data))) + data)
            waiting.append(connection)
        while server.replica.open < 3:
            time.sleep(0.005)
        started = time.monotonic()
        answer = server.http.post("/v1/completions", json=BODY)
        assert time.monotonic() - started < 0.5
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        waiting.pop().close()
        while server.replica.open == 3:
            time.sleep(0.005)
        server.replica.script = Script()
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        for connection in waiting:
            connection.close()
        server.settle()


def test_queued_tokens_from_the_replicas_report():
    with serving(limits={"queued_tokens": 100}) as server:
        server.replica.last_stats = ReplicaStats(
            requests_running=64, requests_waiting=1, waiting_tokens=99
        )
        assert server.http.post("/v1/completions", json=BODY).status_code == 429
        server.replica.last_stats = ReplicaStats(
            requests_running=64, requests_waiting=1, waiting_tokens=98
        )
        assert server.http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (ReplicaState.LOADING, "not_ready"),
        (ReplicaState.DRAINING, "draining"),
        (ReplicaState.FAILED, "unavailable"),
    ],
)
def test_no_ready_replica(server, state, code):
    server.replica.state = state
    try:
        for answer in (
            server.http.post("/v1/completions", json=BODY),
            server.http.get("/ready"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == code
            assert "'toy'" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
    finally:
        server.replica.state = ReplicaState.READY
    assert server.http.get("/ready").json() == {
        "status": "ready",
        "models": {"toy": "ready"},
    }


def test_draining_lets_running_calls_finish_and_takes_no_new_ones():
    with serving() as server:
        server.replica.script = Script(gap_s=0.3)
        stream = server.client().completions.create(**BODY, stream=True)
        text = next(stream).choices[0].text
        server.app.draining.begin()
        for answer in (
            server.http.post("/v1/completions", json=BODY),
            server.http.get("/ready"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert answer.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
        assert server.app.draining.running == 1
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == "Hello world!"
        assert server.call(server.app.draining.drain(5)) == 0


def test_after_the_grace_running_calls_are_told():
    with serving() as server:
        server.replica.script = Script(endless=True, gap_s=0.02)
        stream = server.client().completions.create(**BODY, stream=True)
        next(stream)
        assert server.call(server.app.draining.drain(0.1)) == 1
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.body["code"] == "draining"
        server.settle()
        assert server.replica.open == 0
