"""What all drivers have in common: options, the JSON lines of the answer, memory, errors.

A driver is a class that loads its engine when it is made and then measures. `serve` runs it:

    python -m bench.peers.drivers.llama_cpp --model FILE --work prefill_512 --work decode_8_64

prints `{"load_s": …}`, a line per work with its tokens and seconds or its error, one line of
perplexity if `--perplexity` gives windows of token ids, and at last `{"rss_bytes": …}`. Only
these lines are on stdout: what the engine prints goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from bench.peers.drivers.works import Decode, Prefill, Work, parse


@dataclass(frozen=True, slots=True)
class Settings:
    """What a driver is told."""

    model: str
    """File or folder in the rival's own format."""
    threads: int
    sequences: int
    """Most sequences that any work has at once."""
    sequence_tokens: int
    """Most tokens that a sequence of any work comes to have."""
    scores: bool
    """Windows of text will be scored."""
    options: dict[str, str]
    """Of this contender, such as ``{"unified": "no"}``."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One work, done once. Prompt tokens of a prefill, sampled tokens of decoding."""

    tokens: int
    seconds: float


class Driver(Protocol):
    """An engine that is loaded and can be measured.

    Both measuring methods sample greedily and turn the sampled tokens into text within the time
    they report. Each raises an exception of any kind for work that was not done as asked.
    """

    def prefill(self, work: Prefill) -> Measured:
        """From the prompt's ids to the first token's text."""
        ...

    def decode(self, work: Decode) -> Measured:
        """``DECODE_STEPS`` steps of all sequences at once; their prefill is not in the time."""
        ...

    def score(self, window: Sequence[int]) -> list[float]:
        """Natural-log probabilities of all tokens of a window but the first.

        Raises ``NotImplementedError`` where the engine does not tell them.
        """
        ...


def serve(driver: Callable[[Settings], Driver], arguments: Sequence[str] | None = None) -> None:
    """Be a driver program: parse the command line, load, measure, answer."""
    parsed = _parser().parse_args(arguments)
    works = [parse(name) for name in parsed.work]
    windows = json.loads(Path(parsed.perplexity).read_text()) if parsed.perplexity else []
    with _own_stdout() as out:

        def say(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        started = time.perf_counter()
        engine = driver(
            Settings(
                model=parsed.model,
                threads=parsed.threads,
                sequences=max([1, *(w.sequences for w in works if isinstance(w, Decode))]),
                sequence_tokens=max([64, *map(_sequence_tokens, works), *map(len, windows)]),
                scores=bool(windows),
                options=dict(option.split("=", 1) for option in parsed.option),
            )
        )
        say({"load_s": time.perf_counter() - started})
        if works:
            engine.prefill(Prefill(64))  # a first use allocates, compiles and pages in
            engine.decode(Decode(min(2, max(1, parsed.threads)), 16))
        for work in works:
            say({"work": work.name} | _measure(engine, work))
        if windows:
            say(_score(engine, windows))
        say({"rss_bytes": peak_resident_bytes()})


def cpu_numbers(count: int) -> tuple[int, ...]:
    """The numbers of so many CPUs that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))[:count])


def peak_resident_bytes(root: int | None = None) -> int:
    """Peak resident memory of a process (this one) and of those it started, as far as they live."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        parents[int(folder.name)] = int(fields["PPid"])
        peaks[int(folder.name)] = 1024 * int(fields.get("VmHWM", "0 kB").split()[0])
    family = {os.getpid() if root is None else root}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(peaks.get(pid, 0) for pid in family)


def _measure(engine: Driver, work: Work) -> dict[str, Any]:
    try:
        if isinstance(work, Prefill):
            found, wanted = engine.prefill(work), work.tokens
        else:
            found, wanted = engine.decode(work), None
    except Exception as error:  # noqa: BLE001 - whatever a rival raises is its answer for this work
        return {"error": f"{type(error).__name__}: {error}"}
    if wanted is not None and found.tokens != wanted:
        return {"error": f"computed {found.tokens} tokens instead of {wanted}"}
    return {
        "tokens": found.tokens,
        "seconds": found.seconds,
        "tokens_per_s": found.tokens / found.seconds,
    }


def _score(engine: Driver, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    scores: list[float] = []
    try:
        for window in windows:
            found = engine.score(window)
            if len(found) != len(window) - 1:
                raise ValueError(f"a window of {len(window)} tokens got {len(found)} scores")  # noqa: TRY301 - told like the rival's own errors
            scores += found
    except NotImplementedError:
        return {"perplexity": None}
    except Exception as error:  # noqa: BLE001 - as above
        return {"perplexity": None, "error": f"{type(error).__name__}: {error}"}
    nll = -math.fsum(scores) / len(scores)
    return {"perplexity": math.exp(nll), "nll": nll, "tokens": len(scores)}


def _sequence_tokens(work: Work) -> int:
    # A sequence that is prefilled early decodes while the others are.
    return work.tokens + 1 if isinstance(work, Prefill) else work.context + work.sequences + 40


def _own_stdout() -> IO[str]:
    """Keep stdout for our lines alone; prints of the engine, also native ones, go to stderr."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--work", action="append", default=[])
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--perplexity", metavar="FILE", help="JSON: a list of lists of token ids")
    return parser
