"""``tokenpath bench load``: measure an endpoint from outside, as its clients meet it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from tokenpath.bench import load as loads
from tokenpath.bench import progress, report, settings, table, trace
from tokenpath.bench.client import Client, Endpoint
from tokenpath.bench.measure import Measurements
from tokenpath.bench.wire import Api, PromptKind
from tokenpath.cli import bench_engine, bench_retrieval
from tokenpath.protocol.errors import SpecError

app = typer.Typer(
    help="Measure an endpoint, or the engine itself.", no_args_is_help=True, add_completion=False
)

_INTERRUPTED = 130


@app.callback()
def bench() -> None:
    """Measure an endpoint, or the engine itself."""


app.command("engine")(bench_engine.engine)
app.command("perplexity")(bench_engine.perplexity)
app.command("retrieval")(bench_retrieval.retrieval)


@app.command("load")
def load(
    url: Annotated[str, typer.Option(help="Base URL of the API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="Model to ask. Default: the first the server lists.")
    ] = None,
    api: Annotated[Api, typer.Option(help="Endpoint to drive.")] = Api.COMPLETIONS,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Closed loop: keep N requests in flight. Default: 1, unless --rate or --trace is "
            "given.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Open loop: Poisson arrivals, R requests a second."),
    ] = None,
    trace_file: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Open loop: replay an Azure or Mooncake trace. With --concurrency only its "
            "lengths and shared blocks, in its order.",
        ),
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(metavar="X", help="Stretch the trace's time: 2 halves its rate. Default: 1."),
    ] = None,
    length_divisor: Annotated[
        int | None, typer.Option(metavar="N", help="Divide the trace's lengths. Default: 1.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Send at most N requests. Default: 100, unless --duration is given."
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Start no request after S seconds. Default: 60, unless --requests is given.",
        ),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Open loop: requests due while N are in flight are not sent. Default: 1024.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(metavar="N|uniform:A-B", help="Length of prompts. Default: 128."),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(metavar="N|uniform:A-B", help="Length of answers. Default: 64."),
    ] = None,
    shared_prefix_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Beginning of the prompt that all requests share."),
    ] = None,
    prompts: Annotated[
        PromptKind | None,
        typer.Option(
            help="Token ids (exact lengths, --api completions only) or English words. "
            "Default: tokens for completions, words for chat."
        ),
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            metavar="LOW-HIGH", help="Token ids to draw from, HIGH excluded. Default: 1000-20000."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes prompts, lengths and arrivals repeatable. Default: a new one, so that no "
            "earlier run's prompts are in the server's cache."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exactly the length wanted.")
    ] = True,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature. Default: the server's.")
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=S,itl=S,tpot=S,e2e=S",
            help="Count requests within all of these seconds (goodput).",
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Send N requests first that are not measured.")
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option(metavar="S", help="A request that takes longer has failed.")
    ] = 600.0,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Also write the report as JSON; - is stdout."),
    ] = None,
) -> None:
    """Put load on an OpenAI-compatible endpoint and report what its clients experience.

    Reports time to first token, every gap between output events, end-to-end time, throughput,
    errors and goodput. Ctrl-C ends the run and reports what was measured so far.
    """
    configuration = settings.check(
        url=url,
        model=model,
        api=api,
        api_key_env=api_key_env,
        concurrency=concurrency,
        rate=rate,
        trace_file=trace_file,
        time_scale=time_scale,
        length_divisor=length_divisor,
        requests=requests,
        duration_s=duration,
        max_in_flight=max_in_flight,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix_tokens,
        prompt_kind=prompts,
        vocabulary=vocabulary,
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        limits=limits,
        warmup=warmup,
        timeout_s=timeout_s,
    )
    bench_engine.check_writable(json)
    rows = _trace_rows(configuration)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, stopped = runner.run(_measure(configuration, rows, _api_key(api_key_env)))
    bench_engine.publish(table.render(found), found.json(), json)
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if not found.requests.completed:
        raise typer.Exit(1)


async def _measure(
    configuration: settings.Settings, rows: list[trace.TraceRow] | None, api_key: str | None
) -> tuple[report.Report, bool]:
    """Run the load; returns the report and whether it was stopped by hand."""
    endpoint = Endpoint.parse(configuration.url)
    client = Client(endpoint, api_key=api_key)
    run = loads.Run(configuration, Measurements(configuration.limits))
    model = await loads.choose_model(client, endpoint, configuration.model)
    with _stopped_by_ctrl_c(run.stop):
        showing = asyncio.create_task(progress.show(run, Console(stderr=True)))
        try:
            await loads.drive(
                run,
                client,
                model,
                settings.plan(configuration, None if rows is None else iter(rows)),
                settings.plan_warmup(configuration),
            )
        finally:
            showing.cancel()
            await asyncio.wait({showing})
            client.close()
    return report.build(run, model, now=dt.datetime.now(dt.UTC)), run.stop.is_set()


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C set ``stop``; a second one interrupts as usual."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _trace_rows(configuration: settings.Settings) -> list[trace.TraceRow] | None:
    """Read what will be replayed now, so that a bad line is told before the load starts."""
    if configuration.trace is None:
        return None
    rows = trace.read_trace(Path(configuration.trace))
    if configuration.mode == "trace":
        last = configuration.duration_s / configuration.time_scale
        rows = itertools.takewhile(lambda row: row.offset_s <= last, rows)
    return list(itertools.islice(rows, configuration.requests))


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SpecError(f"the environment variable {variable} named by --api-key-env is not set")
    return key
