"""Progress as people see it."""

import io

import pytest

from tokenpath.models.progress import SilentProgress
from tokenpath.models.progress_terminal import BarProgress, LineProgress, terminal_progress
from tokenpath.models.sizes import human_bytes


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    assert isinstance(terminal_progress(Terminal()), BarProgress)
    assert isinstance(terminal_progress(io.StringIO()), LineProgress)


def test_lines_come_at_the_start_now_and_then_and_at_the_end():
    now, out = [0.0], io.StringIO()
    progress = LineProgress(out, clock=lambda: now[0], every_s=5)
    progress.start(10_000_000, "model")
    for second in range(1, 11):
        now[0] = float(second)
        progress.advance(1_000_000)
    progress.note("a retry")
    progress.finish()
    progress.finish()
    assert out.getvalue().splitlines() == [
        "model (10.0 MB) …",
        "model: 5.0 MB of 10.0 MB, 1.0 MB/s",
        "model: 10.0 MB of 10.0 MB, 1.0 MB/s",
        "a retry",
        "model: 10.0 MB of 10.0 MB, 1.0 MB/s",
    ]


def test_lines_of_unknown_size():
    out = io.StringIO()
    progress = LineProgress(out, clock=lambda: 0.0)
    progress.start(None, "model")
    progress.advance(7)
    progress.finish()
    assert out.getvalue() == "model …\nmodel: 7 B\n"


@pytest.mark.parametrize("total", [1000, None])
def test_a_bar_is_drawn_and_left_complete(total):
    out = Terminal()
    progress = BarProgress(out)
    progress.advance(5)
    progress.start(total, "model")
    progress.advance(1500)
    progress.advance(-500)
    progress.note("[not markup]")
    progress.finish()
    progress.finish()
    assert "model" in out.getvalue()
    assert "kB" in out.getvalue()
    assert "[not markup]" in out.getvalue()


def test_silence_accepts_everything():
    progress = SilentProgress()
    progress.start(None, "x")
    progress.advance(1)
    progress.note("y")
    progress.finish()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_117_320_768, "1.1 GB"),
        (-2500, "-2.5 kB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text
