"""``tokenpath bench retrieval``: the task, the figures, and the command on a small encoder."""

import json

import numpy as np
import pytest
from tests.engine.encoders import CLASSIFIERS, ENCODERS, WORDS, made, saved
from typer.testing import CliRunner

from tokenpath.bench.retrieval import task
from tokenpath.cli.bench import app


def text(words, seed=0):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def test_a_question_is_what_its_passage_lacks():
    words = [f"w{i}" for i in range(250)]
    cut = task.cut([" ".join(words)])
    assert len(cut.passages) == len(cut.questions) == 2
    for index, (passage, question) in enumerate(zip(cut.passages, cut.questions, strict=True)):
        block = words[index * 96 : (index + 1) * 96]
        assert len(question.split()) == 12
        assert sorted(passage.split() + question.split()) == sorted(block)
    assert len(task.cut([" ".join(words)] * 3, most=2).passages) == 2


def test_figures_of_a_known_ranking():
    passages = np.eye(4, dtype=np.float32)
    questions = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 3, 2, 1]], np.float32)
    order = task.ranking(questions, passages)
    assert order[:, 0].tolist() == [0, 0, 2, 1]
    found = task.judge(order)
    assert found.recall_at_1 == 0.5 and found.recall_at_10 == 1.0
    assert found.mean_reciprocal_rank == pytest.approx((1 + 1 / 2 + 1 + 1 / 3) / 4)
    assert task.agreement(order, order, first=2) == 1.0
    assert task.agreement(order, order[:, ::-1], first=2) < 1.0
    assert task.least_cosine(passages, passages) == 1.0


def test_the_command(tmp_path):
    folder = saved(made(ENCODERS["bert"]), tmp_path / "model")
    (tmp_path / "text").write_text(text(1000))
    report = tmp_path / "report.json"
    options = ["--model", str(folder), "--text", str(tmp_path / "text"), "--rounds", "1"]
    result = CliRunner().invoke(
        app,
        ["retrieval", *options, "--threads", "1", "--json", str(report)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_bytes())
    assert [each["dtype"] for each in found["results"]] == ["float32", "bfloat16"]
    exact, rounded = found["results"]
    assert exact["same_top_10"] == 1.0 and exact["least_cosine"] == pytest.approx(1.0)
    assert 0.9 < rounded["least_cosine"] < 1.0
    assert found["passages"] == 10 and exact["tokens_per_s"] > 0
    assert "recall@10" in result.output


def test_a_model_without_embeddings_is_told_so(tmp_path):
    folder = saved(made(CLASSIFIERS["bert-1"]), tmp_path / "model")
    (tmp_path / "text").write_text(text(300))
    result = CliRunner().invoke(
        app, ["retrieval", "--model", str(folder), "--text", str(tmp_path / "text")]
    )
    assert result.exit_code != 0
    assert "it can rerank" in str(result.exception)
