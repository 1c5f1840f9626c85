"""`tokenpath models quantize` as a user types it, on a random model that takes a moment."""

import json
import random

import pytest

from tokenpath.models.local import open_model


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text to calibrate with and another to measure with."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "dog", "fox", "token", "12", "def", "return", "over", "lazy", "answer"]
    for seed, name in enumerate(["calibrate.txt", "measure.txt"]):
        drawn = random.Random(seed).choices(words, k=300)
        (folder / name).write_text(" ".join(drawn))
    return folder


def test_a_gguf_becomes_a_folder_with_a_report(tokenpath, tiny_gguf, texts, tmp_path):
    out = tmp_path / "out"
    done = tokenpath(
        "models",
        "quantize",
        str(tiny_gguf),
        "--to",
        "int4",
        "--calibrate",
        str(texts / "calibrate.txt"),
        "--text",
        str(texts / "measure.txt"),
        "--out",
        str(out),
        "--threads",
        "1",
        "--json",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["target"] == "int4"
    assert report["rounded"] == 14
    assert report["calibration"]["tokens"] > 300
    assert report["out_bytes"] < report["source_bytes"] / 2
    forms = [report[name] for name in ("before", "while_loading", "after")]
    assert [form["dtype"] for form in forms] == ["bfloat16", "int4", "int4"]
    assert all(form["perplexity"] > 1 and form["decode_tokens_per_s"] > 0 for form in forms)
    assert forms[0]["stored_bytes"] == report["source_bytes"]
    assert forms[2]["stored_bytes"] == report["out_bytes"]
    model, source = open_model(out), open_model(tiny_gguf)
    assert model.tensors["model.layers.1.mlp.down_proj.weight"].dtype == "packed 4-bit"
    assert model.config.eos_ids == source.config.eos_ids
    assert model.chat_template() is not None
    text = "the quick brown fox"
    assert model.tokenizer().encode(text) == source.tokenizer().encode(text)


def test_the_table_and_the_default_folder(tokenpath, tiny_gguf, texts, tmp_path):
    done = tokenpath(
        "models", "quantize", str(tiny_gguf), "--to", "int8", "--no-measure", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-int8: 14 matrices in int8, symmetric, 13 tensors kept" in done.stdout
    shown = tokenpath("models", "show", str(tmp_path / "tiny-int8"))
    assert "int8" in shown.stdout
    again = tokenpath(
        "models", "quantize", str(tiny_gguf), "--to", "int8", "--no-measure", cwd=tmp_path
    )
    assert again.returncode == 3
    assert "tiny-int8 exists already" in again.stderr


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--to", "int3"], 2, "int3"),
        ([], 2, "--to"),
        (
            ["--to", "int4", "--calibrate", "nowhere.txt"],
            2,
            "--calibrate nowhere.txt cannot be read",
        ),
        (["--to", "int4", "--out", "nowhere/x"], 3, "there is no folder nowhere"),
        (
            ["--to", "int4", "--text", "a", "--calibrate", "a"],
            2,
            "--calibrate and --text are both a",
        ),
        (["--to", "int4", "--calibrate", "empty.txt"], 2, "empty.txt has 0 tokens, too few"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    options, code, sentence, tokenpath, tiny_gguf, tmp_path
):
    (tmp_path / "empty.txt").write_text("")
    done = tokenpath("models", "quantize", str(tiny_gguf), *options, "--no-measure", cwd=tmp_path)
    assert done.returncode == code
    assert sentence in " ".join(done.stderr.split())
    assert not list(tmp_path.glob("tiny-int4*"))
