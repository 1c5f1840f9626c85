"""`make bench-peers`: tokenpath beside other engines, on this machine, in one sitting.

    python -m bench.peers.compare --model qwen2.5-coder-1.5b --rounds 5

Installs what the contenders need, converts the model, runs all of them alternately, and prints the
medians and the ratio of tokenpath's best to the best peer's. A rival that cannot be installed, or
that crashes or hangs, is told in the table.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.peers.child import PERPLEXITY, Answer, Limits, measure
from bench.peers.drivers.works import ALL, parse
from bench.peers.forms import ensure_form
from bench.peers.install import UnavailableError, ensure, say
from bench.peers.journal import Journal, JournalError
from bench.peers.places import REPOSITORY, python_of, sittings_dir
from bench.peers.rivals import CONTENDERS, Contender
from bench.peers.sitting import Turn, run, turns
from bench.peers.table import Results, document, markdown
from bench.peers.text import token_windows
from tokenpath.config.paths import models_dir
from tokenpath.engine.cpus import default_threads
from tokenpath.models.source import resolve
from tokenpath.protocol.errors import TokenpathError


class Field:
    """The contenders on this machine: what each needs to run, and how it is run."""

    def __init__(self, model: str, options: argparse.Namespace, journal: Path) -> None:
        self._model = model
        self._threads = options.threads or default_threads()
        self._limits = Limits(load_s=options.load_limit, work_s=options.work_limit)
        self._log = journal.with_suffix(".log")
        self._source = resolve(model, models_dir=models_dir())
        self._paths: dict[str, Path] = {}
        self._windows = journal.with_suffix(".windows.json")
        self.unavailable: dict[str, str] = {}

    def prepare(self, contenders: Iterable[Contender], *, perplexity: bool) -> list[Contender]:
        """Install and convert; those of them that can run."""
        ready = []
        for contender in contenders:
            try:
                ensure(contender.rival)
                self._paths[contender.name] = ensure_form(contender.form, self._model, self._source)
            except UnavailableError as error:
                self.unavailable[contender.name] = str(error)
                say(f"{contender.name}: {error}")
            else:
                ready.append(contender)
        if perplexity:
            self._windows.write_text(json.dumps(token_windows(self._source)))
        return ready

    def measure(self, turn: Turn[Contender]) -> Iterable[Answer]:
        """Run a contender's driver for a turn's works, or for its perplexity."""
        contender, works = turn.contender, turn.works
        say(f"{dt.datetime.now(dt.UTC):%H:%M:%S} {contender.name}: {', '.join(works)}")
        base = [
            str(python_of(contender.rival)), "-m", contender.driver,
            "--model", self._model if contender.ours else str(self._paths[contender.name]),
            "--threads", str(self._threads),
            *(f"--option={name}={value}" for name, value in contender.options.items()),
        ]  # fmt: skip

        def command(left: Sequence[str]) -> list[str]:
            if PERPLEXITY in left:
                return [*base, "--perplexity", str(self._windows)]
            return [*base, *(f"--work={work}" for work in left)]

        return measure(
            command,
            works,
            self._limits,
            folder=REPOSITORY,
            log=self._log,
            answers_at_end=contender.answers_at_end,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sitting, or go on with one. 1 if no contender could run, 2 for wrong options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Leave through the `finally` that ends the child.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        works = [parse(name).name for name in options.only.split(",")]
        contenders = [_contender(name) for name in options.contenders.split(",")]
    except ValueError as error:
        parser.error(str(error))
    started = dt.datetime.now(dt.UTC)
    path = options.journal or sittings_dir() / f"{options.model}-{started:%Y%m%d-%H%M%S}.jsonl"
    try:
        journal = Journal(path, {"model": options.model, "threads": options.threads})
        field = Field(options.model, options, path)
        ready = field.prepare(contenders, perplexity=options.perplexity)
    except (JournalError, TokenpathError) as error:
        say(f"bench-peers: {error}")
        return 1
    if not ready:
        say("bench-peers: no contender can run here")
        return 1
    say(f"journal: {path} (give it as --journal to go on with this sitting)")
    todo = turns(ready, works, options.rounds, journal, perplexity=options.perplexity)
    run(todo, field.measure, journal, now=lambda: dt.datetime.now(dt.UTC).isoformat())
    results = Results(journal.entries, contenders)
    heading = (
        f"{options.model}, {options.threads or default_threads()} threads, "
        f"{options.rounds} rounds, {started:%d %B %Y}, tokens/s as medians."
    )
    page = markdown(results, works, unavailable=field.unavailable, heading=heading)
    print(page)
    if options.markdown:
        options.markdown.write_text(page)
    if options.json:
        found = document(results, works, unavailable=field.unavailable)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _contender(name: str) -> Contender:
    if name not in CONTENDERS:
        raise ValueError(f"{name!r} is no contender; contenders are {', '.join(CONTENDERS)}")
    return CONTENDERS[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="a name of the catalogue")
    parser.add_argument("--only", default=",".join(ALL), metavar="WORK,…")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), metavar="NAME,…")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: the CPUs we may use")
    parser.add_argument("--perplexity", action="store_true", help="also measure quality, once each")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="begin or go on with this one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--load-limit", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--work-limit", type=float, default=900, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
