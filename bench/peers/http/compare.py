"""`make bench-peers-http`: tokenpath's server beside other servers, under one load over HTTP.

    python -m bench.peers.http.compare --trace AzureLLMInferenceTrace_conv.csv --rounds 3

Installs what the servers need, converts the model, and in every round starts each server in turn,
waits until it is ready, lets `tokenpath bench load` run the first requests of the trace in a closed
loop, and ends it. Prints medians, and the ratio of tokenpath's best to the best peer's output
tokens per second. A server that cannot be installed, crashes, or answers with another number of
tokens than it was asked for is told in the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.peers.child import LOAD, MEMORY, Answer
from bench.peers.drivers.harness import cpu_numbers
from bench.peers.forms import ensure_form
from bench.peers.http.contenders import SERVERS, Launch, Server
from bench.peers.http.drive import LoadError, Workload, figures, run_load
from bench.peers.http.page import ALL_METRICS, document, markdown
from bench.peers.http.serving import ServerError, free_port, serving
from bench.peers.install import UnavailableError, ensure, say
from bench.peers.journal import Journal, JournalError
from bench.peers.places import python_of, sittings_dir
from bench.peers.sitting import Turn, run, turns
from bench.peers.table import Results
from tokenpath.config.paths import models_dir
from tokenpath.engine.cpus import default_threads
from tokenpath.models.source import resolve
from tokenpath.protocol.errors import TokenpathError


class Field:
    """The servers on this machine: what each needs to run, and how it is measured."""

    def __init__(self, options: argparse.Namespace, workload: Workload, journal: Path) -> None:
        self._options = options
        self._workload = workload
        self._log = journal.with_suffix(".log")
        self._reports = journal.with_suffix(".reports")
        self._reports.mkdir(exist_ok=True)
        self._source = resolve(options.model, models_dir=models_dir())
        self._models: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}

    def prepare(self, servers: Iterable[Server]) -> list[Server]:
        """Install and convert; those of them that can run."""
        ready = []
        for server in servers:
            try:
                ensure(server.rival)
                path = ensure_form(server.form, self._options.model, self._source)
            except UnavailableError as error:
                self.unavailable[server.name] = str(error)
                say(f"{server.name}: {error}")
            else:
                self._models[server.name] = self._options.model if server.ours else str(path)
                ready.append(server)
        return ready

    def measure(self, turn: Turn[Server]) -> Iterator[Answer]:
        """Start a server, load it, end it: a figure for each metric, or one reason for all."""
        server = turn.contender
        say(f"{dt.datetime.now(dt.UTC):%H:%M:%S} round {turn.round}: {server.name}")
        try:
            found = self._measure(server, self._reports / f"{server.name}-{turn.round}.json")
        except (ServerError, LoadError) as error:
            say(f"{server.name}: {error}")
            yield from (Answer(name, None, str(error)) for name in turn.works)
        else:
            yield from (Answer(name, found[name]) for name in turn.works)

    def _measure(self, server: Server, report: Path) -> dict[str, float]:
        report.unlink(missing_ok=True)
        options = self._options
        port = free_port()
        with tempfile.TemporaryDirectory() as scratch:
            launch = Launch(
                python=python_of(server.rival),
                model=self._models[server.name],
                port=port,
                cpus=cpu_numbers(options.threads or default_threads()),
                slots=options.clients,
                sequence_tokens=self._workload.sequence_tokens,
                scratch=Path(scratch),
            )
            with serving(
                server.command(launch),
                port,
                server.ready,
                limit_s=options.start_limit,
                log=self._log,
            ) as served:
                run_load(
                    served.url,
                    self._workload,
                    report=report,
                    log=self._log,
                    limit_s=options.run_limit,
                )
                beside = {LOAD: served.start_s, MEMORY: float(served.peak_bytes())}
        return beside | figures(json.loads(report.read_text()), self._workload)


def main(arguments: list[str] | None = None) -> int:
    """Run a sitting, or go on with one. 1 if no server could run, 2 for wrong options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Leave through the `finally` that ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    unknown = [name for name in options.contenders.split(",") if name not in SERVERS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no contender; contenders are {', '.join(SERVERS)}")
    servers = [SERVERS[name] for name in options.contenders.split(",")]
    started = dt.datetime.now(dt.UTC)
    path = options.journal or sittings_dir() / f"http-{options.model}-{started:%Y%m%d-%H%M%S}.jsonl"
    try:
        workload = Workload.read(
            options.trace,
            requests=options.requests,
            length_divisor=options.length_divisor,
            clients=options.clients,
        )
        sitting = {"model": options.model, "threads": options.threads} | workload.identity()
        journal = Journal(path, sitting)
        field = Field(options, workload, path)
        ready = field.prepare(servers)
    except (JournalError, TokenpathError) as error:
        say(f"bench-peers-http: {error}")
        return 1
    if not ready:
        say("bench-peers-http: no server can run here")
        return 1
    say(f"journal: {path} (give it as --journal to go on with this sitting)")
    todo = turns(ready, ALL_METRICS, options.rounds, journal, perplexity=False)
    run(todo, field.measure, journal, now=lambda: dt.datetime.now(dt.UTC).isoformat())
    results = Results(journal.entries, servers)
    heading = _heading(options, workload, started)
    page = markdown(results, heading=heading, unavailable=field.unavailable)
    print(page)
    if options.markdown:
        options.markdown.write_text(page)
    if options.json:
        found: dict[str, Any] = document(results, sitting=sitting, unavailable=field.unavailable)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _heading(options: argparse.Namespace, workload: Workload, started: dt.datetime) -> str:
    return (
        f"{options.model}; the first {len(workload.lengths)} requests of {options.trace.name}, "
        f"lengths / {workload.length_divisor} ({workload.prompt_tokens:,} prompt and "
        f"{workload.output_tokens:,} output tokens), {workload.clients} clients; servers with "
        f"{options.threads or default_threads()} threads, the load generator on the same CPUs; "
        f"medians of {options.rounds} rounds; {started:%d %B %Y}."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--requests", type=_count, default=128, help="the trace's first so many")
    parser.add_argument("--length-divisor", type=_count, default=8, metavar="N")
    parser.add_argument("--clients", type=_count, default=16)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="a name of the catalogue")
    parser.add_argument("--contenders", default=",".join(SERVERS), metavar="NAME,…")
    parser.add_argument("--rounds", type=_count, default=3)
    parser.add_argument("--threads", type=_count, help="default: the CPUs we may use")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="begin or go on with this one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--start-limit", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--run-limit", type=float, default=900, metavar="SECONDS")
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
