"""`make bench-peers`: order, resuming, medians, and drivers that crash, hang or talk nonsense."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from bench.peers.child import LOAD, MEMORY, PERPLEXITY, Answer, Limits, measure
from bench.peers.drivers.harness import Measured, Settings, serve
from bench.peers.drivers.works import ALL, IDS, Decode, Prefill, parse
from bench.peers.journal import Entry, Journal, JournalError
from bench.peers.rivals import CONTENDERS, FORMS, OURS, RIVALS, Contender
from bench.peers.sitting import ONCE, rotated, run, turns
from bench.peers.table import Results, document, markdown

REPOSITORY = Path(__file__).parents[2]
PATIENT = Limits(load_s=30, work_s=30)
SITTING = {"model": "m", "threads": None}

A, B, C = (Contender(name=name, rival="llama.cpp", driver="none") for name in "ABC")
US = Contender(name="us", rival=OURS, driver="none")

DRIVER = """
import json, os, signal, sys, time
works = [a.split("=", 1)[1] for a in sys.argv if a.startswith("--work=")]
print(json.dumps({"load_s": 0.5}), flush=True)
for work in works:
    if work == "crash":
        print("error: out of cheese", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if work == "hang":
        time.sleep(600)
    if work == "babble":
        print("loading shards", flush=True)
    if work == "refuse":
        print(json.dumps({"work": work, "error": "ValueError: too long"}), flush=True)
    else:
        print(json.dumps({"work": work, "tokens_per_s": 10.0 * len(works)}), flush=True)
print(json.dumps({"rss_bytes": 1000}), flush=True)
"""


def entry(contender, work, value, *, in_round=1, error=None):
    return Entry(contender=contender, round=in_round, work=work, value=value, error=error, at="now")


@pytest.fixture
def drive(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)

    def run_driver(works, limits=PATIENT, **options):
        def command(left):
            return [sys.executable, str(script), *(f"--work={work}" for work in left)]

        log = tmp_path / "driver.log"
        return list(measure(command, works, limits, folder=tmp_path, log=log, **options))

    return run_driver


def test_answers_of_a_driver_that_behaves(drive):
    assert drive(["a", "refuse"]) == [
        Answer(LOAD, 0.5),
        Answer("a", 20.0),
        Answer("refuse", None, "ValueError: too long"),
        Answer(MEMORY, 1000),
    ]


def test_a_crash_costs_one_work_and_tells_its_reason(drive):
    answers = {a.work: a for a in drive(["a", "crash", "b"])}
    assert answers["a"].value == 30.0
    assert answers["crash"].error == "ended with signal 11: error: out of cheese"
    assert answers["b"].value == 10.0  # measured by a second child, which was asked only for it


def test_a_hang_is_ended_and_costs_one_work(drive):
    answers = {a.work: a for a in drive(["hang", "b"], Limits(load_s=30, work_s=0.5))}
    assert answers["hang"].error == "no answer within 0.5 s"
    assert answers["b"].value == 10.0


def test_nonsense_costs_the_work_it_came_instead_of(drive):
    answers = {a.work: a for a in drive(["babble", "b"])}
    assert "loading shards" in answers["babble"].error
    assert answers["b"].value == 10.0


def test_a_driver_that_answers_at_the_end_loses_all_that_is_left(drive):
    answers = {a.work: a for a in drive(["a", "crash", "b"], answers_at_end=True)}
    assert answers["a"].value == 30.0
    assert answers["crash"].error == answers["b"].error
    assert answers["b"].value is None


def test_a_driver_that_does_not_start_fails_every_work_once(tmp_path):
    answers = list(
        measure(
            lambda _: [sys.executable, "-c", "raise SystemExit('no such model')"],
            ["a", "b"],
            PATIENT,
            folder=tmp_path,
            log=tmp_path / "log",
        )
    )
    assert [a.work for a in answers] == ["a", "b"]
    assert {a.error for a in answers} == {"ended with status 1: no such model"}


def test_each_round_begins_with_another_contender():
    orders = [[c.name for c in rotated([A, B, C], number)] for number in (1, 2, 3, 4)]
    assert orders == [["A", "B", "C"], ["B", "C", "A"], ["C", "A", "B"], ["A", "B", "C"]]


def test_a_sitting_measures_all_and_goes_on_where_it_was_interrupted(tmp_path):
    works = ("x", "y")
    asked = []

    def measuring(turn):
        asked.append((turn.contender.name, turn.works))
        for work in turn.works:
            if len(asked) == 4 and work == "y":
                raise KeyboardInterrupt
            yield Answer(work, 1.0)

    path = tmp_path / "sitting.jsonl"
    journal = Journal(path, SITTING)
    with pytest.raises(KeyboardInterrupt):
        run(turns([A, B], works, 3, journal, perplexity=True), measuring, journal, now=lambda: "t")
    assert asked == [("A", works), ("B", works), ("B", works), ("A", works)]

    asked.clear()
    again = Journal(path, SITTING)
    assert again.entries == journal.entries
    asked += [None] * 10  # no interruption this time
    run(turns([A, B], works, 3, again, perplexity=True), measuring, again, now=lambda: "t")
    assert asked[10:] == [
        ("A", ("y",)),
        ("A", works),
        ("B", works),
        ("A", (PERPLEXITY,)),
        ("B", (PERPLEXITY,)),
    ]
    assert list(turns([A, B], works, 3, Journal(path, SITTING), perplexity=True)) == []


def test_an_error_is_an_answer_and_is_not_asked_again(tmp_path):
    journal = Journal(tmp_path / "j", SITTING)
    journal.add(entry("A", "x", None, error="no"))
    assert list(turns([A], ["x"], 1, journal, perplexity=False)) == []
    assert journal.has("A", 1, "x")
    assert not journal.has("A", ONCE, "x")


def test_a_line_that_was_cut_short_is_forgotten(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, SITTING)
    journal.add(entry("A", "x", 1.0))
    with path.open("a") as file:
        file.write('{"contender": "A", "rou')
    again = Journal(path, SITTING)
    again.add(entry("A", "y", 2.0))
    assert [e.work for e in Journal(path, SITTING).entries] == ["x", "y"]


def test_a_journal_of_another_sitting_is_refused(tmp_path):
    path = tmp_path / "j"
    Journal(path, SITTING)
    with pytest.raises(JournalError, match="name another file"):
        Journal(path, {"model": "other", "threads": None})
    path.write_text("what is this\n")
    with pytest.raises(JournalError, match="no journal"):
        Journal(path, SITTING)


def test_medians_and_ratios():
    entries = [
        entry("A", "x", 10.0),
        entry("A", "x", 30.0, in_round=2),
        entry("A", "x", 20.0, in_round=3),
        entry("B", "x", None, error="Error: llama_decode answered 1"),
        entry("B", "x", 15.0, in_round=2),
        entry("us", "x", 50.0),
        entry("us", "y", 5.0),
        entry("A", MEMORY, 2e6),
        entry("A", MEMORY, 3e6, in_round=2),
        entry("us", PERPLEXITY, 9.2345, in_round=ONCE),
    ]
    results = Results(entries, [A, B, C, US])
    row = results.compare("x")
    assert (row.best_peer, row.best_peer_rate, row.best_ours) == ("A", 20.0, "us")
    assert row.ratio == 2.5
    assert results.compare("y").ratio is None
    assert results.compare("z").best_peer is None

    page = markdown(results, ["x", "y"], unavailable={"C": "no compiler"}, heading="Title")
    lines = page.splitlines()
    assert "| x | A | 20.0 | 50.0 | 2.50 |" in lines
    assert "| y | - | - | 5.0 | - |" in lines
    assert "| B | 15.0 (1 failed) | - |" in lines
    assert "| A | - | 3 | - |" in lines
    assert "| us | 9.2345 | - | - |" in lines
    assert "- C: no compiler" in lines
    assert "- B, x: Error: llama_decode answered 1" in lines

    found = json.loads(json.dumps(document(results, ["x", "y"], unavailable={})))
    assert found["works"]["x"]["ratio"] == 2.5
    assert found["contenders"]["A"]["x"] == {"median": 20.0, "rounds": [10, 30, 20], "errors": []}


def test_every_contender_names_what_exists():
    for contender in CONTENDERS.values():
        assert contender.rival in {*RIVALS, OURS}
        assert contender.form is None or contender.form in FORMS
        module = REPOSITORY / f"{contender.driver.replace('.', '/')}.py"
        assert module.is_file(), contender
    for form in FORMS.values():
        assert form.rival in {*RIVALS, OURS}
        assert form.made_from is None or form.made_from in FORMS
        assert "{source}" in form.arguments
        assert "{target}" in form.arguments
        if form.module.startswith("bench."):
            assert (REPOSITORY / f"{form.module.replace('.', '/')}.py").is_file(), form
    for rival in RIVALS.values():
        assert all("==" in package for package in rival.packages), rival


def test_works_have_the_same_names_and_prompts_everywhere():
    assert [parse(name).name for name in ALL] == list(ALL)
    assert Prefill(512).prompt() == Prefill(512).prompt()
    assert set(Prefill(512).prompt()) <= set(IDS)
    prompts = Decode(4, 64).prompts()
    assert [len(prompt) for prompt in prompts] == [64] * 4
    assert len({tuple(prompt) for prompt in prompts}) == 4
    # Two sequences of 1,024 tokens need four steps of 512: the first decodes during two of them.
    assert [len(prompt) for prompt in Decode(2, 1024).prompts(512)] == [1022, 1024]
    with pytest.raises(ValueError, match="no work"):
        parse("decode_8")


class FakeEngine:
    """Two of a driver's methods work; the third does not."""

    def __init__(self, settings: Settings):
        assert settings.options == {"unified": "no"}
        assert settings.sequences == 8
        sys.stdout.write("a banner\n")

    def prefill(self, work):
        return Measured(work.tokens - (work.tokens == 5), 0.5)

    def decode(self, work):
        if work.sequences == 8:
            raise RuntimeError("no room")
        return Measured(work.sequences * 32, 2.0)

    def score(self, window):
        return [-1.0] * (len(window) - 1)


def test_a_driver_answers_in_lines_of_json_whatever_the_engine_prints(tmp_path, capfd):
    windows = tmp_path / "windows.json"
    windows.write_text("[[1, 2, 3], [4, 5]]")
    works = [f"--work={name}" for name in ("prefill_4", "prefill_5", "decode_2_16", "decode_8_64")]
    arguments = [*works, "--option=unified=no", "--perplexity", str(windows)]
    before = os.dup(1)
    try:
        serve(FakeEngine, ["--model=m", "--threads=1", *arguments])
    finally:
        os.dup2(before, 1)
        os.close(before)
    out, err = capfd.readouterr()
    assert "a banner" in err or "a banner" in out
    load, *answers, score, memory = [json.loads(line) for line in out.splitlines() if "{" in line]
    assert load["load_s"] >= 0
    assert answers == [
        {"work": "prefill_4", "tokens": 4, "seconds": 0.5, "tokens_per_s": 8.0},
        {"work": "prefill_5", "error": "computed 4 tokens instead of 5"},
        {"work": "decode_2_16", "tokens": 64, "seconds": 2.0, "tokens_per_s": 32.0},
        {"work": "decode_8_64", "error": "RuntimeError: no room"},
    ]
    assert score == {"perplexity": math.e, "nll": 1.0, "tokens": 3}
    assert memory["rss_bytes"] > 1e6
