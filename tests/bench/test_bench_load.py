"""Whole runs against a server whose timing and counts are known."""

import asyncio
import datetime as dt
import json
import time

import pytest
import sse_server
from rich.console import Console
from sse_server import Script

from tokenpath.bench import load, progress, report, settings, table
from tokenpath.bench.client import Client, Endpoint
from tokenpath.bench.measure import Measurements
from tokenpath.bench.observe import Observation
from tokenpath.bench.wire import Api
from tokenpath.protocol.errors import (
    AuthenticationError,
    ModelNotFoundError,
    TokenpathError,
    UnavailableError,
)

NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)


async def measured(script, *, stop_after_s=None, url=None, plan=None, **options):
    """Run a load on a server following ``script``; returns the report."""
    with sse_server.serving(sse_server.make_app(script)) as served:
        configuration = settings.check(url=url or served, seed=1, **options)
        run = load.Run(configuration, Measurements(configuration.limits))
        client = Client(Endpoint.parse(configuration.url))
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, run.stop.set)
        await load.drive(
            run,
            client,
            "tiny",
            plan or settings.plan(configuration),
            settings.plan_warmup(configuration),
        )
        client.close()
        found = report.build(run, "tiny", now=NOW)
    assert not run.live
    requests = found.requests
    assert requests.sent == requests.completed + requests.failed + requests.interrupted
    return found


async def test_closed_loop_counts_and_order_of_times():
    script = Script(first_delay_s=0.03, gap_s=0.004)
    found = await measured(
        script,
        concurrency=3,
        requests=10,
        prompt_tokens="20",
        output_tokens="5",
        warmup=2,
        limits="ttft=60,itl=60",
    )
    assert len(script.bodies) == 12  # with the warm-up, which is not measured
    assert script.most_live == 3
    assert (found.requests.sent, found.requests.completed) == (10, 10)
    assert found.requests.finish_reasons == {"length": 10}
    assert (found.ttft_s.count, found.end_to_end_s.count) == (10, 10)
    assert found.inter_token_s.count == 10 * 4
    tokens = found.tokens
    assert (tokens.prompt, tokens.planned_prompt, tokens.output, tokens.output_events) == (
        200,
        200,
        50,
        50,
    )
    assert (tokens.cached_prompt, tokens.per_output_event) == (0, 1.0)
    assert tokens.unexpected_output_lengths == tokens.requests_without_usage == 0
    assert found.ttft_s.p50 >= 0.029
    assert found.inter_token_s.p50 >= 0.003
    assert found.ttft_s.p50 <= found.ttft_s.p90 <= found.ttft_s.p99 <= found.ttft_s.max
    assert found.end_to_end_s.p50 >= found.ttft_s.p50 + 4 * 0.003
    assert found.elapsed_s * 3 >= found.end_to_end_s.mean * 10 * 0.99
    assert found.rates.requests_per_s == pytest.approx(10 / found.elapsed_s)
    assert found.rates.output_tokens_per_s == pytest.approx(50 / found.elapsed_s)
    assert found.rates.total_tokens_per_s == pytest.approx(250 / found.elapsed_s)
    assert (found.goodput.requests, found.goodput.share) == (10, 1.0)
    assert found.generator.loop_lag_s.count > 0
    assert found.generator.connections_opened <= 3
    prompts = {tuple(body["prompt"]) for body in script.bodies}
    assert len(prompts) == 12


async def test_chat_ttft_is_not_the_role_chunk():
    found = await measured(
        Script(first_delay_s=0.15), api=Api.CHAT, requests=2, prompt_tokens="9", output_tokens="3"
    )
    assert found.ttft_s.p50 >= 0.14
    assert found.tokens.prompt == 18
    assert found.tokens.output_events == 6


async def test_events_of_several_tokens_are_told():
    found = await measured(Script(tokens_per_event=4), requests=2, output_tokens="8")
    assert (found.tokens.output, found.tokens.output_events, found.tokens.per_output_event) == (
        16,
        4,
        4.0,
    )
    assert found.inter_token_s.count == 2
    assert any("4.00 tokens on average" in note for note in found.notes)


async def test_unknown_usage_is_not_zero():
    found = await measured(Script(usage=False), requests=2, output_tokens="3", limits="tpot=9")
    assert found.tokens.requests_without_usage == 2
    assert found.tokens.prompt is found.tokens.output is found.tokens.cached_prompt is None
    assert found.rates.output_tokens_per_s is None
    assert found.goodput.requests == 0  # an unknown time per token meets no limit
    assert any("without usage" in note for note in found.notes)


async def test_an_unwanted_cache_hit_is_told():
    found = await measured(Script(cached_tokens=64), requests=2)
    assert found.tokens.cached_prompt == 128
    assert any("cache" in note for note in found.notes)
    shared = await measured(Script(cached_tokens=64), requests=2, shared_prefix_tokens=64)
    assert not any("cache" in note for note in shared.notes)
    template = await measured(Script(cached_tokens=64, template_tokens=70), requests=2)
    assert not any("cache" in note for note in template.notes)


async def test_ignored_ignore_eos_is_told():
    found = await measured(Script(text="a|b"), requests=2, output_tokens="5")
    assert found.tokens.unexpected_output_lengths == 2
    assert any("ignore_eos" in note for note in found.notes)


async def test_open_loop_arrivals_do_not_wait_for_answers():
    script = Script(first_delay_s=1.0)
    found = await measured(script, rate=100.0, requests=20, output_tokens="1")
    spread = script.arrived_at[-1] - script.arrived_at[0]
    assert spread < 1.0  # all had arrived before the first was answered
    assert script.most_live == 20
    assert found.requests.completed == 20
    assert found.generator.lateness_s.count == 20
    assert found.ttft_s.p50 >= 0.99


async def test_open_loop_turns_away_beyond_its_cap_and_counts():
    script = Script(first_delay_s=2.0)
    found = await measured(
        script, rate=200.0, requests=30, max_in_flight=10, output_tokens="1", limits="e2e=60"
    )
    assert script.most_live == 10
    assert (found.requests.sent, found.requests.overflowed) == (10, 20)
    assert found.goodput.share == pytest.approx(10 / 30)
    assert any("--max-in-flight" in note for note in found.notes)


async def test_duration_bounds_starts_in_both_loops():
    closed = await measured(Script(gap_s=0.01), duration_s=0.4, output_tokens="5")
    assert 1 <= closed.requests.completed < 30
    opened = await measured(Script(), duration_s=0.5, rate=40.0, output_tokens="1")
    assert opened.requests.sent == len(offsets(40.0, 0.5))


def offsets(rate, until):
    found = []
    for moment in settings.arrivals.poisson_offsets(rate, 1):
        if moment > until:
            return found
        found.append(moment)
    return found


async def test_errors_are_counted_by_code_and_do_not_count_as_latency():
    found = await measured(
        Script(fail_status=429, fail_from=6), requests=10, output_tokens="2", limits="e2e=60"
    )
    assert (found.requests.completed, found.requests.failed) == (6, 4)
    assert [(e.kind, e.status, e.code, e.count) for e in found.errors] == [
        ("status", 429, "overloaded", 4)
    ]
    assert found.errors[0].example == "come back later"
    assert found.end_to_end_s.count == 6
    assert found.goodput.share == 0.6


@pytest.mark.parametrize(
    ("script", "kind"),
    [(Script(error_after=2), "stream"), (Script(truncate_after=2), "truncated")],
)
async def test_answers_that_break_are_errors(script, kind):
    found = await measured(script, requests=2, output_tokens="9")
    assert [(e.kind, e.status, e.count) for e in found.errors] == [(kind, 200, 2)]
    assert found.ttft_s.count == found.inter_token_s.count == 0


async def test_timeouts_are_counted():
    script = Script(first_delay_s=30)
    found = await measured(script, requests=2, concurrency=2, timeout_s=0.2)
    assert [(e.kind, e.count) for e in found.errors] == [("timeout", 2)]
    assert len(script.bodies) == 2


async def test_connection_errors_are_counted():
    found = await measured(Script(), url="http://127.0.0.1:9/v1", requests=3)
    assert [(e.kind, e.count) for e in found.errors] == [("connect", 3)]


@pytest.mark.parametrize("mode", [{"concurrency": 4}, {"rate": 50.0}])
async def test_stopping_reports_what_there_is(mode):
    started = time.monotonic()
    found = await measured(
        Script(gap_s=0.02), stop_after_s=0.8, requests=1000, output_tokens="10", **mode
    )
    assert time.monotonic() - started < 8
    assert found.requests.completed > 0
    assert found.requests.interrupted > 0
    assert found.requests.sent < 1000
    assert any("Stopped by hand" in note for note in found.notes)


async def test_mooncake_replay_sends_the_shared_blocks():
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 2, "hash_ids": ids})
        for at, length, ids in [(0, 1024, [0, 1]), (50, 1100, [0, 2, 3]), (100, 700, [4, 5])]
    ]
    script = Script()
    configuration = settings.check(url="http://h/v1", seed=1, trace_file="m", length_divisor=8)
    rows = settings.trace.parse_trace(lines, "m")
    found = await measured(
        script, trace_file="m", length_divisor=8, plan=settings.plan(configuration, iter(rows))
    )
    assert found.requests.completed == 3
    one, two, three = (
        body["prompt"] for body in sorted(script.bodies, key=lambda b: -len(b["prompt"]))
    )
    assert [len(one), len(two), len(three)] == [138, 128, 88]
    assert one[:64] == two[:64]
    assert one[64] != two[64]
    assert three[0] != one[0]
    assert script.arrived_at[2] - script.arrived_at[0] >= 0.09


async def test_a_closed_loop_over_a_trace_takes_its_lengths_and_not_its_moments():
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:00:00.0000000,80,1",
        "2023-11-16 19:00:00.0000000,41,9",
        "2023-11-16 20:00:00.0000000,7,17",
    ]
    options = {"trace_file": "a.csv", "concurrency": 2, "length_divisor": 8}
    script = Script()
    rows = settings.trace.parse_trace(lines, "a.csv")
    configuration = settings.check(url="http://h/v1", seed=1, **options)
    found = await measured(script, **options, plan=settings.plan(configuration, iter(rows)))
    assert found.requests.completed == 3
    assert sorted((len(b["prompt"]), b["max_tokens"]) for b in script.bodies) == [
        (1, 3),
        (6, 2),
        (10, 1),
    ]
    assert found.configuration.mode == "closed"
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table.render(found))
    assert "closed loop, 2 in flight; trace a.csv, lengths / 8" in shown.get()


async def test_an_error_of_the_plan_ends_the_run():
    def broken():
        yield next(settings.plan(settings.check(url="http://h/v1", seed=1, rate=100.0)))
        raise ModelNotFoundError("the plan broke")

    with pytest.raises(ModelNotFoundError, match="the plan broke"):
        await measured(Script(), rate=100.0, plan=broken())


async def test_report_as_json_and_as_table(capsys):
    found = await measured(
        Script(fail_status=503, fail_from=3),
        requests=4,
        rate=100.0,
        limits="e2e=9",
        output_tokens="3",
    )
    plain = json.loads(found.json())
    assert plain["format"] == 1
    assert plain["date"] == "2026-01-02T00:00:00+00:00"
    assert plain["configuration"]["rate_per_s"] == 100.0
    assert plain["machine"]["cpus"] >= 1
    assert plain["versions"]["tokenpath"]
    assert set(plain["inter_token_s"]) == {"count", "mean", "p50", "p90", "p99", "max", "exact"}
    Console(width=120).print(table.render(found))
    shown = capsys.readouterr().out
    for words in ("time to first token", "inter-token (every gap)", "end to end", "Poisson arrivals", "goodput",
                  "error: 1 x status 503 overloaded: come back later", "seed 1"):  # fmt: skip
        assert words in shown


def test_progress_in_a_line():
    now = 100.0
    configuration = settings.check(url="http://h/v1", seed=1, rate=1.0, requests=20, warmup=2)
    run = load.Run(configuration, Measurements(), clock=lambda: now)
    shown = progress.Progress(run)
    run.warming_up = True
    assert shown.line() == "warming up with 2 requests"
    run.warming_up, run.started_at, now = False, 101.0, 103.0
    run.measured.output_events, run.measured.output_tokens = 60, 90
    run.measured.completed, run.measured.overflowed = 6, 1
    run.live.add(Observation())
    assert shown.line() == (
        "2 s: 6/20 requests ended, 1 in flight, about 30 tokens/s, 0 errors, 1 not sent"
    )


@pytest.mark.parametrize(
    ("script", "wanted", "error", "words"),
    [
        (Script(models=["a", "b"]), "c", ModelNotFoundError, "serves a, b"),
        (Script(models=[]), None, TokenpathError, "names no model"),
        (Script(wanted_key="k"), None, AuthenticationError, "--api-key-env"),
    ],
)
async def test_mistakes_are_told_before_the_load(script, wanted, error, words):
    with sse_server.serving(sse_server.make_app(script)) as url:
        endpoint = Endpoint.parse(url)
        with pytest.raises(error, match=words):
            await load.choose_model(Client(endpoint), endpoint, wanted)


async def test_the_model_is_chosen_and_the_key_sent():
    with sse_server.serving(sse_server.make_app(Script(models=["a", "b"], wanted_key="k"))) as url:
        endpoint = Endpoint.parse(url)
        client = Client(endpoint, api_key="k")
        assert await load.choose_model(client, endpoint, None) == "a"
        assert await load.choose_model(client, endpoint, "b") == "b"


async def test_an_unreachable_server_is_told():
    endpoint = Endpoint.parse("http://127.0.0.1:9/v1")
    with pytest.raises(UnavailableError, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        await load.choose_model(Client(endpoint), endpoint, None)
