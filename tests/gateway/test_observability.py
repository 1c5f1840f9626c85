"""What a request leaves behind: its log line, its stages, its metrics; and never its text."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from gateway_harness import Script, serving
from prometheus_client.parser import text_string_to_metric_families

from tokenpath.gateway.auth import Identity
from tokenpath.protocol.errors import AuthenticationError
from tokenpath.protocol.events import EngineStages
from tokenpath.protocol.replica import ReplicaState, ReplicaStats

BODY = {"model": "toy", "prompt": "my secret words"}


def samples(server) -> dict[tuple[str, tuple], float]:
    text = server.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_line_of_a_request(server, log):
    server.replica.script = Script(before_s=0.01)
    answer = server.http.post("/v1/completions", json=BODY, headers={"x-request-id": "r1"})
    assert answer.headers["x-request-id"] == "r1"
    line = log.next()
    assert line["rid"] == "r1"
    assert line["endpoint"] == "/v1/completions"
    assert (line["model"], line["status"], line["outcome"]) == ("toy", 200, "ok")
    assert (line["in"], line["cached"], line["out"]) == (16, 3, 4)
    assert line["ttft_ms"] > 0
    assert list(line["stages"]) == [
        *("authenticate", "receive", "policy", "tokenize", "route"),
        *("queue", "prefill", "decode", "flush", "unattributed"),
    ]
    assert (line["stages"]["queue"], line["stages"]["prefill"], line["stages"]["decode"]) == (
        1,
        2,
        3,
    )
    assert sum(line["stages"].values()) == pytest.approx(line["wall_ms"], abs=0.02)
    assert re.search(
        r"rid=r1 endpoint=/v1/completions model=toy status=200 outcome=ok in=16 cached=3 out=4 "
        r"ttft_ms=[\d.]+ wall_ms=[\d.]+ stages=authenticate:[\d.e-]+,receive:\S+unattributed:\S+\n",
        log.text,
    )


def test_lines_of_failures(server, log):
    server.http.post("/v1/completions", json={**BODY, "model": "other\nforged=1"})
    line = log.next()
    assert (line["status"], line["outcome"], line["error"]) == (404, "rejected", "model_not_found")
    assert "model" not in line
    assert "forged" not in log.text
    server.replica.script = Script(fail_after=1)
    server.http.post("/v1/completions", json={**BODY, "stream": True})
    line = log.next()
    assert (line["status"], line["outcome"], line["error"]) == (200, "failed", "engine_error")
    assert (line["in"], line["out"], line["stream"]) == (16, 1, True)
    assert "cached" not in line
    server.replica.script = Script(fail_after=0, error=KeyError("my secret words"))
    server.http.post("/v1/completions", json=BODY)
    assert log.next()["outcome"] == "failed"
    assert "unexpected KeyError" in log.text


def test_the_line_of_a_disconnect(server, log):
    server.replica.script = Script(hold_first=True)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=BODY, timeout=0.2)
    server.settle()
    line = log.next()
    assert (line["status"], line["outcome"], line["error"]) == (499, "disconnected", "cancelled")


def test_flush_is_the_clients_time(server, log):
    """A client that reads late, after the engine has finished, shows in flush alone."""
    server.replica.script = Script(words=("x" * 100_000,) * 100)
    with server.http.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 100}
    ) as answer:
        time.sleep(0.4)
        answer.read()
    line = log.next()
    assert line["stages"]["flush"] > 300
    assert line["stages"]["unattributed"] < 200


def test_the_critical_path_is_the_choice_that_ended_last(server, log):
    server.replica.script = lambda request: (
        Script(before_s=0.1, stages=EngineStages(queue_s=0.05, prefill_s=0.02, decode_s=0.01))
        if request.request_id.endswith("-1")
        else Script(stages=EngineStages(queue_s=9, prefill_s=9, decode_s=9))
    )
    server.http.post("/v1/completions", json={**BODY, "n": 3})
    stages = log.next()["stages"]
    assert (stages["queue"], stages["prefill"], stages["decode"]) == (50, 20, 10)
    assert stages["unattributed"] >= 0


def test_probes_are_quiet(server, log):
    for path in ("/health", "/ready", "/metrics"):
        assert server.http.get(path).status_code == 200
    assert log.text == ""


def test_keys_are_required_and_named_in_the_line(log):
    class Keys:
        def authenticate(self, headers):
            if headers.get("authorization") != "Bearer right":
                raise AuthenticationError("A valid key is required.")
            return Identity(key_id=7, name="me")

    with serving(authenticator=Keys()) as server:
        for method, path in [
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/toy"),
        ]:
            answer = server.http.request(method, path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/openapi.json", "/docs"):
            assert server.http.get(path).status_code == 200
        right = {"authorization": "Bearer right"}
        answer = server.http.post("/v1/completions", json=BODY, headers=right)
        assert answer.status_code == 200
        assert log.next()["status"] == 401
        assert log.next()["key"] == "7"
        assert server.replica.requests[0].cache_salt == "7"


def test_names_and_values_of_the_metrics():
    with serving() as server:
        server.replica.last_stats = ReplicaStats(
            requests_running=2,
            requests_waiting=3,
            kv_blocks_used=5,
            kv_blocks_cached=7,
            kv_blocks_total=64,
            prompt_tokens_total=100,
            cached_prompt_tokens_total=40,
            generated_tokens_total=50,
            preemptions_total=1,
        )
        server.http.post("/v1/completions", json=BODY)
        server.http.post("/v1/completions", json={**BODY, "model": "x"})
        found = samples(server)
        replica = (("model", "toy"), ("replica", "0"))
        for name, value in {
            "tokenpath_requests_running": 2,
            "tokenpath_requests_waiting": 3,
            "tokenpath_kv_blocks_used": 5,
            "tokenpath_kv_blocks_cached": 7,
            "tokenpath_kv_blocks_total": 64,
            "tokenpath_prompt_tokens_total": 100,
            "tokenpath_cached_prompt_tokens_total": 40,
            "tokenpath_generated_tokens_total": 50,
            "tokenpath_preemptions_total": 1,
            "tokenpath_replica_up": 1,
        }.items():
            assert found[name, replica] == value, name
        toy = (("model", "toy"),)
        assert found["tokenpath_time_to_first_token_seconds_count", toy] == 1
        assert found["tokenpath_inter_token_latency_seconds_count", toy] == 3
        assert found["tokenpath_requests_in_flight", ()] == 1  # the scrape itself
        for stage in ("receive", "tokenize", "queue", "prefill", "decode", "flush", "unattributed"):
            assert found["tokenpath_stage_seconds_count", (("stage", stage),)] == 1
        assert found["tokenpath_stage_seconds_sum", (("stage", "prefill"),)] == 0.002
        completions = ("endpoint", "/v1/completions")
        assert (
            found[
                "tokenpath_requests_total",
                (("code", "200"), completions, ("model", "toy"), ("outcome", "ok")),
            ]
            == 1
        )
        assert (
            found[
                "tokenpath_requests_total",
                (("code", "404"), completions, ("model", ""), ("outcome", "rejected")),
            ]
            == 1
        )


def test_counters_never_fall_when_a_replica_restarts():
    with serving() as server:
        replica = (("model", "toy"), ("replica", "0"))
        name = "tokenpath_generated_tokens_total"
        for counted, total in [(10, 10), (25, 25), (4, 29), (6, 31), (6, 31), (0, 31)]:
            server.replica.last_stats = ReplicaStats(generated_tokens_total=counted)
            assert samples(server)[name, replica] == total
        server.replica.state = ReplicaState.FAILED
        found = samples(server)
        assert found[name, replica] == 31
        assert found["tokenpath_replica_up", replica] == 0
        assert ("tokenpath_requests_running", replica) not in found


def test_labels_stay_few(server):
    before = len(samples(server))
    for number in range(20):
        server.http.get(f"/no/such/path/{number}")
        server.http.post("/v1/completions", json={**BODY, "model": f"m{number}"})
        server.http.get(f"/v1/models/m{number}")
    assert len(samples(server)) - before < 60
