"""Sleep, wake and reload of a real server with a small model, by its command line."""

import json
import os
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from tests.e2e.server import run, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from test_structured import make_model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("operated")
    spec = {
        "gateway": {"admin": "local"},
        "models": [
            {
                "name": "toy",
                "source": str(make_model("byte level", home)),
                "engine": {"dtype": "float32", "threads": 1, "kv_cache_tokens": 4096},
            }
        ],
    }
    with serving(home, spec) as served:
        yield served


def replicas(served, *args):
    return run(served.home, "replicas", *args, "--url", served.url)


def state_of(served):
    [model] = json.loads(replicas(served, "list", "--json").stdout)
    return model


def complete(served, **fields):
    body = {"model": "toy", "prompt": "abc", "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def test_sleep_and_wake_by_command_and_by_request(served):
    before = complete(served).json()["choices"][0]["text"]
    slept = replicas(served, "sleep", "toy")
    assert slept.returncode == 0, slept.stderr
    assert "asleep" in slept.stdout
    pid = served.engine.pid
    assert state_of(served)["state"] == "asleep"
    assert httpx.get(f"{served.url}/ready").json()["models"] == {"toy": "asleep"}
    assert complete(served).json()["choices"][0]["text"] == before
    assert state_of(served)["state"] == "ready"
    assert replicas(served, "sleep", "toy").returncode == 0
    assert "ready" in replicas(served, "wake", "toy").stdout
    assert served.engine.pid == pid
    assert served.metric("tokenpath_generated_tokens_total") == 8
    unknown = replicas(served, "wake", "tox")
    assert unknown.returncode == 1
    assert "'tox' is not served here; served: 'toy'" in unknown.stderr


def test_a_reload_takes_what_the_spec_says_now_while_requests_stream(served):
    first = state_of(served)
    answers, stopping = [], threading.Event()

    def ask():
        while not stopping.is_set():
            body = {"model": "toy", "prompt": "abc", "max_tokens": 100, "stream": True}
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
            with httpx.stream(
                "POST", f"{served.url}/v1/completions", json=body, timeout=60
            ) as answer:
                answers.append((answer.status_code, answer.read().decode()))

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    file = served.home / "spec.yaml"
    spec = yaml.safe_load(file.read_text())
    try:
        spec["models"][0]["engine"]["max_context_tokens"] = 512
        file.write_text(yaml.safe_dump(spec))
        reloaded = replicas(served, "reload", "toy")
        assert reloaded.returncode == 0, reloaded.stderr
        seen = len(answers)
        while len(answers) < seen + 6:
            assert clients[0].is_alive()
    finally:
        stopping.set()
        for client in clients:
            client.join(60)
    assert {status for status, _ in answers} == {200}
    assert all(text.endswith("data: [DONE]\n\n") for _, text in answers)
    assert all('"completion_tokens":100' in text for _, text in answers), "every stream is whole"
    [model] = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert model["max_model_len"] == 512
    second = state_of(served)
    assert second["pid"] != first["pid"]
    assert second["replica"] == "toy-0.1"

    spec["models"][0]["engine"]["device"] = "abacus"
    file.write_text(yaml.safe_dump(spec))
    failed = replicas(served, "reload", "toy")
    assert failed.returncode == 1
    assert "device 'abacus' cannot be used" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert state_of(served)["pid"] == second["pid"]
    assert complete(served).status_code == 200
    assert served.metric("tokenpath_generated_tokens_total") > 8, "counters outlive a reload"


def test_an_admin_key_operates_the_server_and_another_does_not(served):
    keys = {}
    for name, flags in (("user", ()), ("chief", ("--admin",))):
        keys[name] = run(served.home, "keys", "create", name, *flags).stdout.strip()
    assert "admin" in run(served.home, "keys", "list").stdout
    deadline = 100
    while httpx.get(f"{served.url}/v1/models").status_code != 401 and deadline:
        deadline -= 1
        threading.Event().wait(0.05)
    environment = dict(os.environ)
    try:
        os.environ["TOKENPATH_API_KEY"] = keys["user"]
        refused = replicas(served, "sleep", "toy")
        assert refused.returncode == 1
        assert "this key may ask models but not operate the server" in refused.stderr
        os.environ["TOKENPATH_API_KEY"] = keys["chief"]
        assert replicas(served, "sleep", "toy").returncode == 0
    finally:
        os.environ.clear()
        os.environ.update(environment)
