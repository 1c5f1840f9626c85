"""`make bench-load`: each chat or completion model of the catalogue at 1, 8 and 32 callers.

Each model gets a server of its own on a free port; `tokenpath bench load` drives it in a closed
loop at each level, once per round. The table has p50 / p99, each the median over
the rounds; the single reports are kept as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

TOKENPATH = str(Path(sys.executable).parent / "tokenpath")
MODELS = ("gemma-3-270m", "qwen2.5-coder-1.5b")
LEVELS = (1, 8, 32)
START_S = 300


@contextmanager
def served(model: str, home: Path) -> Iterator[str]:
    """Serve a model with the default spec on a free port; yields its URL once it is ready."""
    log = home / f"{model}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [TOKENPATH, "serve", "--model", model, "--port", "0"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TOKENPATH_HOME": str(home)},
        )
        try:
            yield wait_ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL from the server's first lines, once `/ready` says yes."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"Listening on (http://[\d.:]+)", log.read_text())
        if found and httpx.get(f"{found[1]}/ready").is_success:
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not become ready:\n{log.read_text()}")


def measure(url: str, level: int, arguments: argparse.Namespace, file: Path) -> dict:
    """One run of `tokenpath bench load`; its JSON report."""
    command = [
        TOKENPATH, "bench", "load", "--url", f"{url}/v1", "--concurrency", str(level),
        "--requests", str(max(arguments.least_requests, 2 * level)), "--warmup", "2",
        "--prompt-tokens", str(arguments.prompt_tokens),
        "--output-tokens", str(arguments.output_tokens), "--json", str(file),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())


def row(model: str, level: int, reports: list[dict]) -> str:
    """A line of the table: medians over the rounds."""

    def median(*path: str) -> float:
        values = []
        for report in reports:
            value = report
            for key in path:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    ttft, itl, e2e = (
        f"{1000 * median(name, 'p50'):,.0f} / {1000 * median(name, 'p99'):,.0f}"
        for name in ("ttft_s", "inter_token_s", "end_to_end_s")
    )
    failed = sum(report["requests"]["failed"] for report in reports)
    tokens = median("rates", "output_tokens_per_s")
    return f"| {model} | {level} | {ttft} | {itl} | {e2e} | {tokens:,.1f} | {failed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least-requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tokenpath-bench-"))
    lines = [
        "| model | callers | TTFT, ms | ITL, ms | end to end, ms | output tokens/s | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in arguments.models:
        with served(model, folder) as url:
            for level in LEVELS:
                reports = []
                for number in range(arguments.rounds):
                    print(f"{model}, {level} callers, round {number + 1}", file=sys.stderr)
                    file = folder / f"{model}-{level}-{number}.json"
                    reports.append(measure(url, level, arguments, file))
                lines.append(row(model, level, reports))
    print("\n".join(lines))
    print(f"reports: {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
