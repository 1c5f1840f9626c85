"""A real `tokenpath serve` process with a home of its own, for tests that talk to it as users do."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import yaml

START_S = 90
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


@dataclass
class Served:
    process: subprocess.Popen
    home: Path
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def engine(self) -> psutil.Process:
        """The engine's process, the server's only child that runs torch."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [c for c in children if "tokenpath.engine" in " ".join(c.cmdline())]
        return found

    def output(self) -> str:
        return "\n".join(self.lines)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(map(float, samples))

    def wait_idle(self, timeout_s: float = 10) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metric("tokenpath_requests_running") or self.metric(
            "tokenpath_requests_waiting"
        ):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"TOKENPATH_HOME": str(home), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


def command(*args: str) -> list[str]:
    return [str(Path(sys.executable).parent / "tokenpath"), *args]


def run(home: Path, *args: str, timeout_s: float = 60, **kwargs) -> subprocess.CompletedProcess:
    """Run the CLI to its end."""
    return subprocess.run(
        command(*args),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **kwargs,
    )


@contextlib.contextmanager
def serving(home: Path, spec: dict, *flags: str, ready: bool = True):
    """Run `tokenpath serve` on a free port until the block ends."""
    home.mkdir(parents=True, exist_ok=True)
    file = home / "spec.yaml"
    spec.setdefault("gateway", {}).setdefault("port", 0)
    file.write_text(yaml.safe_dump(spec))
    process = subprocess.Popen(
        command("serve", str(file), *flags),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    served = Served(process, home)

    def read() -> None:
        for line in process.stdout:
            served.lines.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        served.url = _wait_for_url(served)
        if ready:
            _wait_ready(served)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        reader.join(10)


def _wait_for_url(served: Served) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"Listening on (http://\S+?)[;,.]?(?:\s|$)", served.output())
        if found:
            return found.group(1)
        assert served.process.poll() is None, f"serve ended:\n{served.output()}"
        time.sleep(0.05)
    raise AssertionError(f"serve did not listen:\n{served.output()}")


def _wait_ready(served: Served) -> None:
    deadline = time.monotonic() + START_S
    while httpx.get(f"{served.url}/ready").status_code != 200:
        assert served.process.poll() is None, f"serve ended:\n{served.output()}"
        assert time.monotonic() < deadline, f"not ready:\n{served.output()}"
        time.sleep(0.1)
