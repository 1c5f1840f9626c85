"""Puts the load on a server with `tokenpath bench load`, and judges whether that was a result.

All servers get the same requests: prompts of exactly the trace's lengths as random token ids, no
end before the wanted length, greedy sampling, streamed. An answer with an error or another length
makes the whole turn no result.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.drivers.works import IDS
from bench.peers.install import last_line
from tokenpath.bench.trace import read_trace, scale

OUTPUT_RATE = "output_tokens_per_s"
METRICS = (
    OUTPUT_RATE,
    "requests_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "tokens_per_event",
    "client_cpu_share",
)
"""What a load's report gives; see ``figures``."""
_WARMUP_REQUESTS = 8
_EXTRA_PROMPT_TOKENS = 1
"""A server may put its token for a beginning before each prompt."""
_CACHED_SHARE = 0.01


class LoadError(Exception):
    """A load that gave no result; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The first requests of a trace, in a closed loop."""

    trace: Path
    length_divisor: int
    clients: int
    lengths: tuple[tuple[int, int], ...]
    """(prompt, output) tokens of each request."""

    @classmethod
    def read(cls, trace: Path, *, requests: int, length_divisor: int, clients: int) -> Workload:
        """Raises ``SpecError`` for a file that is no trace."""
        rows = itertools.islice(read_trace(trace), requests)
        scaled = [scale(row, time_scale=1.0, length_divisor=length_divisor) for row in rows]
        lengths = tuple(
            (sum(tokens for _, tokens in row.blocks), row.output_tokens) for row in scaled
        )
        return cls(trace, length_divisor, clients, lengths)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(output for _, output in self.lengths)

    @property
    def sequence_tokens(self) -> int:
        """Most tokens of a request, measured or of the warm-up, prompt and output together."""
        return max(256, *(prompt + output for prompt, output in self.lengths))

    def identity(self) -> dict[str, Any]:
        """What makes two sittings comparable; no path."""
        digest = hashlib.sha256(json.dumps(self.lengths).encode()).hexdigest()
        return {
            "clients": self.clients,
            "requests": len(self.lengths),
            "length_divisor": self.length_divisor,
            "lengths_sha256": digest,
        }


def run_load(url: str, workload: Workload, *, report: Path, log: Path, limit_s: float) -> None:
    """Run the load and write its ``report``. Raises ``LoadError`` if it could not be run."""
    command = [
        *(sys.executable, "-m", "tokenpath.cli.main", "bench", "load", "--url", url),
        *("--trace", str(workload.trace), "--length-divisor", str(workload.length_divisor)),
        *("--concurrency", str(workload.clients), "--requests", str(len(workload.lengths))),
        *("--warmup", str(_WARMUP_REQUESTS), "--temperature", "0", "--seed", "1"),
        *("--vocabulary", f"{IDS.start}-{IDS.stop}", "--timeout-s", str(limit_s)),
        *("--json", str(report)),
    ]
    with log.open("a") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LoadError(f"the load did not end within {limit_s:g} s") from None
    if not report.exists():
        raise LoadError(f"the load ended with status {done.returncode}: {last_line(log)}")


def figures(report: dict[str, Any], workload: Workload) -> dict[str, float]:
    """The metrics of a report, by name. Raises ``LoadError`` if it is no result."""
    requests, tokens = report["requests"], report["tokens"]
    count = len(workload.lengths)
    if requests["completed"] != count:
        example = "".join(f": {error['example']}" for error in report["errors"][:1])
        raise LoadError(f"{requests['completed']} of {count} requests were answered{example}")
    if tokens["requests_without_usage"]:
        raise LoadError(f"{tokens['requests_without_usage']} answers told no usage")
    if tokens["unexpected_output_lengths"] or tokens["output"] != workload.output_tokens:
        raise LoadError(
            f"{tokens['unexpected_output_lengths']} answers had another length than asked for: "
            f"{tokens['output']} tokens in all instead of {workload.output_tokens}"
        )
    extra = tokens["prompt"] - workload.prompt_tokens
    if not 0 <= extra <= _EXTRA_PROMPT_TOKENS * count:
        raise LoadError(
            f"prompts had {tokens['prompt']} tokens instead of {workload.prompt_tokens}"
        )
    if (tokens["cached_prompt"] or 0) > _CACHED_SHARE * tokens["prompt"]:
        raise LoadError(f"{tokens['cached_prompt']} prompt tokens came from a prefix cache")
    rates, generator = report["rates"], report["generator"]
    return {
        OUTPUT_RATE: rates["output_tokens_per_s"],
        "requests_per_s": rates["requests_per_s"],
        "ttft_p50_s": report["ttft_s"]["p50"],
        "ttft_p99_s": report["ttft_s"]["p99"],
        "itl_p50_s": report["inter_token_s"]["p50"],
        "itl_p99_s": report["inter_token_s"]["p99"],
        "tokens_per_event": tokens["per_output_event"],
        "client_cpu_share": generator["cpu_share"],
    }
