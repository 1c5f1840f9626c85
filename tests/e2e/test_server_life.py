"""Start, stop, keys, limits and crashes of a real server."""

import re
import signal
import socket
import threading
import time

import httpx
import openai
import pytest
from tests.e2e.server import run, serving

pytestmark = pytest.mark.real_model
LONG = {"model": "gemma", "prompt": "x", "max_tokens": 60, "ignore_eos": True}


def test_sigterm_finishes_what_runs(gemma_spec, tmp_path):
    with serving(tmp_path / "home", gemma_spec()) as served:
        answers = []

        def ask():
            answers.append(httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        while not served.metric("tokenpath_requests_running"):
            time.sleep(0.02)
        engine = served.engine
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        late = httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=60)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "draining"
        thread.join(60)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert served.process.wait(20) == 0
        assert not engine.is_running() or engine.status() == "zombie"
        assert "Traceback" not in served.output()


def test_a_killed_engine_fails_its_requests_clearly_and_comes_back(gemma_spec, tmp_path):
    with serving(tmp_path / "home", gemma_spec()) as served:
        client = openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        stream = client.completions.create(
            model="gemma",
            prompt="x",
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        served.engine.kill()
        with pytest.raises(openai.APIError) as lost:
            for _ in stream:
                pass
        assert lost.value.code == "replica_lost"
        assert httpx.get(f"{served.url}/health").status_code == 200
        deadline = time.monotonic() + 60
        while httpx.get(f"{served.url}/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.completions.create(model="gemma", prompt="1 2 3", max_tokens=2)


def test_the_engine_does_not_outlive_a_killed_server(gemma_spec, tmp_path):
    with serving(tmp_path / "home", gemma_spec()) as served:
        engine = served.engine
        served.process.kill()
        served.process.wait(10)
        engine.wait(10)


def test_keys_close_the_door_while_the_server_runs_and_it_stays_closed(gemma_spec, tmp_path):
    home = tmp_path / "home"
    with serving(home, gemma_spec()) as served:
        url = f"{served.url}/v1/models"
        assert httpx.get(url).status_code == 200
        created = run(home, "keys", "create", "laptop")
        key = re.search(r"tp-[\w-]+", created.stdout).group()
        time.sleep(1.2)
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.get(url, headers={"authorization": f"Bearer {key}x"}).status_code == 401
        listed = run(home, "keys", "list").stdout
        assert "laptop" in listed
        assert key not in listed
        identifier = re.search(r"tp-[\w-]{4,}|\b\d+\b", listed).group()
        revoked = run(home, "keys", "revoke", identifier)
        assert revoked.returncode == 0, revoked.stderr
        time.sleep(1.2)
        assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 401
        assert httpx.get(url).status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        database = b"".join(p.read_bytes() for p in home.glob("*.db*"))
        assert database
        assert key.encode() not in database


def test_limits_of_the_spec(gemma_spec, tmp_path):
    spec = gemma_spec(max_running=1)
    spec["gateway"] = {
        "limits": {
            "body_bytes": 5000,
            "input_tokens": 50,
            "output_tokens": 500,
            "queued_requests": 1,
        }
    }
    with serving(tmp_path / "home", spec) as served:
        url = f"{served.url}/v1/completions"

        def ask(**change):
            return httpx.post(url, json=LONG | change, timeout=60)

        assert ask(prompt="x" * 6000).status_code == 413
        assert "50" in ask(prompt="word " * 100).json()["error"]["message"]
        assert "500" in ask(max_tokens=501).json()["error"]["message"]
        statuses = []
        threads = [
            threading.Thread(target=lambda: statuses.append(ask(max_tokens=20))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        codes = sorted(a.status_code for a in statuses)
        assert codes[0] == 200, statuses[0].text
        assert codes[-1] == 429
        refused = next(a for a in statuses if a.status_code == 429)
        assert float(refused.headers["retry-after"]) >= 1


def test_a_request_past_its_seconds_ends_with_an_error(gemma_spec, tmp_path):
    spec = gemma_spec()
    spec["gateway"] = {"limits": {"request_s": 0.5}}
    with serving(tmp_path / "home", spec) as served:
        body = LONG | {"max_tokens": 5000}
        whole = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "deadline_exceeded"
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=30
        ) as stream:
            text = stream.read().decode()
        assert "deadline_exceeded" in text.split("data: ")[-1]
        served.wait_idle()
        assert served.metric("tokenpath_kv_blocks_used") == 0


def test_a_port_in_use_is_named(gemma_spec, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, "serve", "--model", "gemma-3-270m", "--port", str(port))
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_ledger_of_a_request_is_in_its_log_line_and_sums(gemma_spec, tmp_path):
    with serving(tmp_path / "home", gemma_spec(), "--log-format", "json") as served:
        import json

        httpx.post(f"{served.url}/v1/completions", json=LONG | {"max_tokens": 20}, timeout=60)
        time.sleep(0.3)
        records = [json.loads(line) for line in served.lines if line.startswith("{")]
        (line,) = [r for r in records if r.get("out") == 20 or r.get("output_tokens") == 20]
        assert "stages" in line
        assert served.metric("tokenpath_generated_tokens_total") == 20
