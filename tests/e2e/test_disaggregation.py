"""`tokenpath serve` with a replica that prefills and one that decodes: as users see it."""

import asyncio
import contextlib
import signal
import time

import httpx
import openai
import psutil
import pytest
from tests.e2e.server import run, serving

pytestmark = pytest.mark.real_model
LONG = "The harbour master counted the ships that came in with the tide, and wrote them down. " * 40
"""Some 700 tokens."""


@pytest.fixture(scope="module")
def divided(gemma_spec, tmp_path_factory):
    spec = gemma_spec(dtype="auto")
    (model,) = spec["models"]
    model["replicas"] = [{"role": "prefill"}, {"role": "decode"}]
    model["engine"]["max_step_tokens"] = 128
    with serving(tmp_path_factory.mktemp("home"), spec) as served:
        yield served


def client_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def engine_of(served, role: str) -> psutil.Process:
    children = psutil.Process(served.process.pid).children(recursive=True)
    for child in children:
        if "tokenpath.engine" in " ".join(child.cmdline()):
            paths = [c.laddr for c in child.net_connections(kind="unix")]
            if any(str(path).endswith("/give") for path in paths) == (role == "prefill"):
                return child
    raise AssertionError(f"no engine of role {role}")


def ask(served, prompt, **options):
    options = {"max_tokens": 12, "temperature": 0, "logprobs": 2, "stop": None} | options
    return client_of(served).completions.create(model="gemma", prompt=prompt, **options)


def test_long_prompts_are_handed_over_and_streamed(divided):
    prompt = LONG[300:] + "Streamed:"
    before = divided.metric("tokenpath_handovers_total")
    stream = ask(divided, prompt, stream=True, logprobs=None)
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert divided.metric("tokenpath_handovers_total") == before + 1
    again = ask(divided, prompt, n=2)
    assert [choice.text for choice in again.choices] == [text, text]
    assert again.usage.prompt_tokens_details.cached_tokens > 400
    assert divided.metric("tokenpath_handovers_total") == before + 1  # it is cached now
    ask(divided, "The tide")
    assert divided.metric("tokenpath_handovers_total") == before + 1
    assert divided.metric("tokenpath_handover_fallbacks_total") == 0


def test_only_the_prefilling_replica_computes_long_prompts(divided):
    text = httpx.get(f"{divided.url}/metrics").text
    given = [line for line in text.splitlines() if "handover_blocks_given_total{" in line]
    by_place = {line.split('replica="')[1][0]: float(line.split()[-1]) for line in given}
    assert by_place["0"] == 0  # takes requests, so it comes first
    assert by_place["1"] > 0
    assert 'tokenpath_stage_seconds_count{stage="kv_transfer"}' in text


def test_the_prefilling_replica_is_killed_in_the_middle(divided):
    async def scenario():
        client = openai.AsyncOpenAI(
            base_url=f"{divided.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        before = divided.metric("tokenpath_handover_fallbacks_total")
        victim = engine_of(divided, "prefill")
        prompts = [f"Number {n}. {LONG}" * 2 for n in range(3)]
        calls = [
            asyncio.create_task(
                client.completions.create(model="gemma", prompt=p, max_tokens=4, temperature=0)
            )
            for p in prompts
        ]
        await asyncio.sleep(0.6)
        victim.send_signal(signal.SIGKILL)
        for call in calls:
            assert (await call).usage.completion_tokens == 4
        assert divided.metric("tokenpath_handover_fallbacks_total") > before

    asyncio.run(scenario())
    divided.wait_idle()
    # It comes back, and is asked again.
    deadline = time.monotonic() + 60
    while divided.metric("tokenpath_replica_up") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    before = divided.metric("tokenpath_handovers_total")
    ask(divided, "Once more. " + LONG)
    assert divided.metric("tokenpath_handovers_total") == before + 1


def test_the_decoding_replica_is_killed_in_the_middle(divided):
    async def scenario():
        client = openai.AsyncOpenAI(
            base_url=f"{divided.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        victim = engine_of(divided, "decode")
        call = asyncio.create_task(
            client.completions.create(model="gemma", prompt=f"Gone. {LONG}" * 3, max_tokens=4)
        )
        await asyncio.sleep(0.6)
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIStatusError) as raised:
            await call
        assert raised.value.status_code == 503

    asyncio.run(scenario())
    deadline = time.monotonic() + 60
    while divided.metric("tokenpath_replica_up") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    divided.wait_idle()
    assert divided.metric("tokenpath_kv_blocks_used") == 0
    assert ask(divided, "And again. " + LONG).choices[0].text


def test_a_client_that_leaves_frees_both_sides(divided):
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(
            f"{divided.url}/v1/completions",
            json={"model": "gemma", "prompt": f"Left. {LONG}" * 4, "max_tokens": 4},
            timeout=0.4,
        )
    deadline = time.monotonic() + 10
    while divided.metric("tokenpath_kv_blocks_used"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("replicas", "more", "sentence"),
    [
        (["decode"], {}, "a replica of role 'decode' has nobody to prefill for it"),
        (["prefill", "both"], {}, "a replica of role 'prefill' has nobody to prefill for"),
        (["prefill", "decode"], {"engine": {"prefix_cache": False}}, "engine.prefix_cache is off"),
        (
            ["both"],
            {"disaggregation": {"listen": "tcp:0.0.0.0:9100", "secret_file": "s"}},
            "it needs tls with cert, key and ca",
        ),
        (["decode"], {"disaggregation": {"peers": ["tcp:localhost:9"]}}, "needs secret_file"),
        (["half"], {}, "prefill"),
    ],
)
def test_roles_without_a_partner_get_one_sentence(replicas, more, sentence, gemma_spec, tmp_path):
    import yaml

    spec = gemma_spec()
    spec["models"][0] |= {"replicas": [{"role": role} for role in replicas], **more}
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    ended = run(tmp_path, "spec", "check", str(file))
    assert ended.returncode == 2
    assert sentence in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
