"""Calls for vectors through the gateway: order, errors, limits and endings, by a scripted replica."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import numpy as np
import pytest
from gateway_harness import CARD, ByteTokenizer, serving

from tokenpath.gateway.auth import Authenticator
from tokenpath.protocol.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
)
from tokenpath.protocol.events import EngineStages, Failed, Finish, FinishReason, Usage
from tokenpath.protocol.pooling import Pooled, PoolingInput
from tokenpath.protocol.replica import ReplicaState, ReplicaStats
from tokenpath.store.keys import KeySnapshot

PATHS = {
    "/v1/embeddings": {"input": "abc"},
    "/v1/rerank": {"query": "abc", "documents": ["a", "bc"]},
    "/v1/score": {"text_1": "abc", "text_2": "a"},
}
STAGES = EngineStages(queue_s=0.001, prefill_s=0.002)


class ByteInputs(ByteTokenizer):
    """A token a byte, and one before."""

    def single(self, text, *, keep=None):
        return PoolingInput(self.encode(text)[:keep])

    def pair(self, first, second, *, keep=None):
        ids = self.encode(first)
        return PoolingInput((ids + list(second.encode()))[:keep], len(ids))


class PoolingReplica:
    """Gives each input the vector (tokens, last token), one event an input, the last input first."""

    def __init__(self) -> None:
        self.replica_id = "toy-0"
        self.state = ReplicaState.READY
        self.card = msgspec.structs.replace(CARD, task="embed", dimensions=2)
        self.last_stats = ReplicaStats()
        self.requests = []
        self.open = 0
        self.before_s = 0.0
        self.end = None
        """What comes instead of the last event: an error, or a reason to finish."""

    async def pool(self, request):
        self.requests.append(request)
        self.open += 1
        try:
            await asyncio.sleep(self.before_s)
            for place in reversed(range(len(request.inputs))):
                if place == 0 and isinstance(self.end, ReplicaLostError):
                    raise self.end
                if place == 0 and isinstance(self.end, EngineError | OverloadedError):
                    yield Failed(request.request_id, self.end.info(), STAGES)
                    return
                ids = request.inputs[place].token_ids
                row = np.array([len(ids), ids[-1]], "<f4").tobytes()
                reason = self.end or FinishReason.STOP
                finish = Finish(reason, Usage(request.tokens), STAGES) if place == 0 else None
                yield Pooled(request.request_id, [place], row, finish)
        finally:
            self.open -= 1

    async def stats(self):
        return self.last_stats


def embedding_server(**options):
    return serving(
        replica=PoolingReplica(), model={"task": "embed", "inputs": ByteInputs()}, **options
    )


@pytest.fixture(scope="module")
def module_server():
    with embedding_server() as served:
        yield served


@pytest.fixture
def server(module_server):
    replica = module_server.replica
    replica.end, replica.before_s = None, 0.0
    replica.requests.clear()
    yield module_server
    module_server.settle()


def post(server, path, **fields):
    return server.http.post(path, json={"model": "toy", **PATHS[path], **fields})


def test_vectors_take_their_places_in_whatever_order_they_come(server):
    body = post(server, "/v1/embeddings", input=["a", "bc", "def"]).json()
    assert [each["embedding"] for each in body["data"]] == [[2, 97], [3, 99], [4, 102]]
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    (request,) = server.replica.requests
    assert 0 < request.timeout_s <= 600


def test_priority_travels(server):
    assert post(server, "/v1/embeddings", priority=-3).status_code == 200
    assert server.replica.requests[-1].priority == -3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (EngineError("It broke."), 500, "engine_error"),
        (OverloadedError("Full."), 429, "overloaded"),
        (ReplicaLostError("Gone."), 503, "replica_lost"),
        (FinishReason.ABORT, 503, "unavailable"),
    ],
)
def test_a_replicas_failure_is_the_calls(server, path, end, status, code):
    server.replica.end = end
    answer = post(server, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


def test_the_deadline_ends_a_call():
    with embedding_server(limits={"request_s": 0.2}) as server:
        server.replica.before_s = 60
        answer = post(server, "/v1/embeddings")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        server.settle()


def test_a_client_that_leaves_ends_its_call(server):
    server.replica.before_s = 60
    body = json.dumps({"model": "toy", "input": "abc"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = server.connect()
    connection.sendall(head.encode() + body)
    end = time.monotonic() + 10
    while not server.replica.open:
        assert time.monotonic() < end
        time.sleep(0.005)
    connection.close()
    server.settle()


def test_draining_refuses_and_ends_calls():
    with embedding_server() as server:
        server.replica.before_s = 60
        connection = server.connect()
        body = json.dumps({"model": "toy", "input": "abc"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        end = time.monotonic() + 10
        while not server.replica.open:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert server.call(server.app.draining.drain(0)) == 1
        assert b" 503 " in connection.recv(4096)
        assert post(server, "/v1/embeddings").json()["error"]["code"] == "draining"
        connection.close()


def test_a_key_is_needed_once_there_is_one():
    class Keys:
        def current(self):
            return KeySnapshot(ever_created=True, valid={})

    with embedding_server(authenticator=Authenticator(Keys())) as server:
        for path in PATHS:
            assert post(server, path).status_code == 401
        assert not server.replica.requests


def test_a_full_queue_is_told_at_once():
    with embedding_server(limits={"queued_requests": 0}, max_running=1) as server:
        server.replica.last_stats = ReplicaStats(requests_running=1)
        answer = post(server, "/v1/embeddings")
        assert answer.status_code == 429 and "Retry-After" in answer.headers


def test_the_specs_longest_input():
    with embedding_server(limits={"input_tokens": 3}) as server:
        answer = post(server, "/v1/embeddings", input=["ab", "abc"])
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "Input 1 has 4 tokens, but at most 3" in error["message"]


def test_what_the_tokenizer_refuses_is_the_clients_mistake(server, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise InvalidRequestError("No such token.", param="input")

    monkeypatch.setattr(ByteInputs, "single", refuse)
    assert post(server, "/v1/embeddings").json()["error"]["message"] == "No such token."


def test_cosines_order_documents_and_equal_ones_stay(server):
    body = post(server, "/v1/rerank", query="ab", documents=["zz", "ab", "ab"]).json()
    assert [each["index"] for each in body["results"]][:2] == [1, 2]
    assert body["results"][0]["relevance_score"] == pytest.approx(1.0)
