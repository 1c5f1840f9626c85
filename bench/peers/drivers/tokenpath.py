"""Runs `tokenpath bench engine` and `bench perplexity`, and answers as a driver does.

Not a `Driver`: tokenpath's own command measures, in one process for all works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_COMMAND = (sys.executable, "-m", "tokenpath.cli.main", "bench")


def main() -> None:
    """As ``harness.serve``, whose options it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", required=True)
    parser.add_argument("--work", action="append", default=[])
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--perplexity", metavar="FILE", help="only whether: the text is the same")
    parsed = parser.parse_args()
    common = ["--model", parsed.model, "--threads", parsed.threads]
    for option in parsed.option:
        name, value = option.split("=", 1)
        common += [f"--{name}", value]
    if parsed.work:
        only = ("--only", ",".join(parsed.work), "--rounds", "1", "--no-roofline")
        report = _run("engine", *common, *only)
        _say({"load_s": report["load_s"]})
        for work in parsed.work:
            _say({"work": work, "tokens_per_s": report[work]})
        _say({"rss_bytes": report["peak_rss_bytes"]})
    if parsed.perplexity:
        scored = sum(len(window) - 1 for window in json.loads(Path(parsed.perplexity).read_text()))
        report = _run("perplexity", *common)
        if report["tokens"] != scored:
            raise SystemExit(f"{report['tokens']} tokens were scored instead of {scored}")
        _say({name: report[name] for name in ("perplexity", "nll", "tokens")})


def _run(command: str, *arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = subprocess.run(
            [*_COMMAND, command, *arguments, "--json", str(file)], stdout=sys.stderr, check=False
        )
        if done.returncode:
            sys.exit(done.returncode)
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
