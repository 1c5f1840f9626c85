"""`tokenpath models` as a user types it."""

import json
import os
import subprocess
import sys

import pytest
from checkpoints import VOCAB, byte_level_vocabulary, metadata_of, tensors_of, write_gguf
from typer.testing import CliRunner

from tokenpath.cli.models import app
from tokenpath.models import pull as pull_module
from tokenpath.models.library import MANIFEST, Library
from tokenpath.models.sizes import human_bytes
from tokenpath.models.source import parse_source
from tokenpath.protocol.errors import ModelError


@pytest.fixture
def models_dir(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    monkeypatch.setenv("TOKENPATH_MODELS", str(folder))
    monkeypatch.setenv("TOKENPATH_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def gguf(tmp_path):
    metadata = {
        **metadata_of("qwen2"),
        **byte_level_vocabulary(size=VOCAB - 2),
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return write_gguf(tmp_path / "tiny.gguf", "qwen2", metadata, tensors_of("qwen2"))


def run(*arguments, text=None):
    return CliRunner().invoke(app, list(arguments), input=text, catch_exceptions=True)


def put(models_dir, text, files):
    """A model in the library as if it had been pulled."""
    source, library = parse_source(text), Library(models_dir)
    staged = library.workspace(source) / "staged"
    staged.mkdir()
    for name, data in files.items():
        (staged / name).write_bytes(data)
    model = next((n for n in files if n.endswith(".gguf")), ".")
    return library.publish(source, staged, origin="test", model=model)


def test_list_of_nothing_pulled(models_dir):
    result = run("list")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "pulled" in line]
    assert [line.split()[0] for line in lines] == [
        "qwen2.5-coder-1.5b",
        "gemma-3-270m",
        "all-minilm-l6-v2",
    ]
    assert all("not pulled" in line for line in lines)


def test_list_shows_what_is_there_and_what_is_half_there(models_dir, gguf):
    put(models_dir, "gemma-3-270m", {"g.gguf": gguf.read_bytes()})
    put(models_dir, "hf:a/b@main:x.gguf", {"x.gguf": b"GGUF"})
    half = Library(models_dir).workspace(parse_source("all-minilm-l6-v2"))
    (half / "x.part").write_bytes(b"half")
    (models_dir / "a stranger").mkdir()
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "qwen2.5-coder-1.5b": "not pulled",
        "gemma-3-270m": "pulled",
        "all-minilm-l6-v2": "partly pulled",
        "hf:a/b@main:x.gguf": "pulled",
    }
    assert rows["hf:a/b@main:x.gguf"]["bytes"] == 4
    assert rows["gemma-3-270m"]["path"] == str(models_dir / "gemma-3-270m/g.gguf")


def test_show_a_path(models_dir, gguf):
    result = run("show", str(gguf))
    assert result.exit_code == 0, result.exception
    for words in ("qwen2", "4 query, 2 key-value, of 32", "512 tokens", "attention q", "bfloat16"):
        assert words in result.stdout
    facts = json.loads(run("show", str(gguf), "--json").stdout)
    assert facts["chat_template"] is True
    assert facts["architecture"] == "qwen2"
    assert {"weight_bytes", "kv_bytes_per_1000_tokens", "groups"} < set(facts)


def test_show_by_name_what_was_pulled(models_dir, gguf):
    put(models_dir, "pypi:tiny", {"t.gguf": gguf.read_bytes()})
    facts = json.loads(run("show", "pypi:tiny", "--json").stdout)
    assert facts["name"] == "tiny"
    assert facts["path"] == str(models_dir / "pypi+tiny/t.gguf")


def test_show_of_a_catalogue_model_that_is_not_here(models_dir):
    result = run("show", "gemma-3-270m")
    assert result.exit_code == 0
    assert "tokenpath models pull gemma-3-270m" in result.stdout
    assert "268,098,176" in result.stdout
    facts = json.loads(run("show", "gemma-3-270m", "--json").stdout)
    assert facts["pulled"] is False
    assert facts["origins"][1].startswith("hf:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "gema-3-270m"), "did you mean gemma-3-270m"),
        (("show", "hf:a/b"), "tokenpath models pull hf:a/b"),
        (("show", "./none.gguf"), "no file or folder"),
        (("pull", "./none.gguf"), "no file or folder"),
        (("pull", "pypi:tiny", "--from", "hf"), "only one"),
        (("rm", "gemma-3-270m"), "is not pulled"),
        (("rm", "./none.gguf"), "delete it yourself"),
    ],
)
def test_what_cannot_be_done_is_a_model_error(models_dir, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ModelError)
    assert message in str(result.exception)


def test_pull_of_what_is_there_prints_its_path(models_dir, monkeypatch):
    model = put(models_dir, "gemma-3-270m", {"g.gguf": b"GGUF"})
    monkeypatch.setattr(pull_module, "_pull", None)  # nothing is fetched
    result = run("pull", "gemma-3-270m")
    assert result.stdout.strip() == str(model.path)


def test_pull_of_a_path_says_that_it_is_used_where_it_lies(models_dir, gguf):
    result = run("pull", str(gguf))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "used where it lies" in result.stderr


def test_rm_asks_and_takes_no_for_an_answer(models_dir):
    model = put(models_dir, "gemma-3-270m", {"g.gguf": b"GGUF"})
    result = run("rm", "gemma-3-270m", text="n\n")
    assert result.exit_code == 1
    assert "Delete gemma-3-270m (4 B)?" in result.stdout
    assert model.path.exists()
    assert run("rm", "gemma-3-270m", text="y\n").exit_code == 0
    assert not model.folder.exists()


def test_rm_removes_the_packed_weights_of_that_model_only(models_dir, gguf, tmp_path):
    from tokenpath.config.paths import cache_dir
    from tokenpath.engine.packed_cache import PackedCache

    gone = put(models_dir, "gemma-3-270m", {"g.gguf": gguf.read_bytes()})
    kept = put(models_dir, "pypi:tiny", {"t.gguf": gguf.read_bytes()})
    cache = PackedCache(cache_dir() / "packed")
    for model in (gone, kept):
        for dtype in ("int8", "int4"):
            pack(model.path, cache, dtype)
    doomed, others = cache.of(gone.folder), cache.of(kept.folder)
    assert (len(doomed), len(others)) == (2, 2)
    sizes = sum(path.stat().st_size for path in doomed)
    result = run("rm", "gemma-3-270m", text="y\n")
    assert f"{human_bytes(sizes)} of them packed weights" in result.stdout
    assert "are free again" in result.stderr
    assert sorted(cache.folder.glob("*.packed")) == sorted(others)


def pack(path, cache, dtype):
    """What an engine's first start does."""
    import torch

    from tokenpath.engine.runner import ModelRunner
    from tokenpath.models.local import open_model

    ModelRunner(
        open_model(path), dtype=torch.bfloat16, device="cpu", num_blocks=2, block_tokens=16,
        bits=8 if dtype == "int8" else 4, packed_cache=cache,
    )  # fmt: skip


def test_rm_removes_what_is_half_there(models_dir):
    half = Library(models_dir).workspace(parse_source("gemma-3-270m"))
    (half / "x.part").write_bytes(b"half")
    assert run("rm", "gemma-3-270m", "--yes").exit_code == 0
    assert not half.exists()


def test_rm_does_not_follow_links_out_of_the_models_folder(models_dir, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "data").write_text("keep me")
    model = put(models_dir, "gemma-3-270m", {"g.gguf": b"GGUF"})
    (model.folder / "link").symlink_to(outside)
    assert run("rm", "gemma-3-270m", "--yes").exit_code == 0
    assert (outside / "data").read_text() == "keep me"


def test_rm_leaves_a_folder_that_is_a_link(models_dir, tmp_path):
    model = put(models_dir, "gemma-3-270m", {"g.gguf": b"GGUF"})
    elsewhere = tmp_path / "elsewhere"
    model.folder.rename(elsewhere)
    model.folder.symlink_to(elsewhere)
    assert run("rm", "gemma-3-270m", "--yes").exit_code == 0
    assert (elsewhere / "g.gguf").exists()
    assert Library(models_dir).models() == []
    assert not list(models_dir.rglob("*.removed"))


def test_a_manifest_that_points_outside_is_refused(models_dir):
    model = put(models_dir, "gemma-3-270m", {"g.gguf": b"GGUF"})
    manifest = json.loads((model.folder / MANIFEST).read_text())
    for bad in ("../../x.gguf", "/etc/passwd"):
        (model.folder / MANIFEST).write_text(json.dumps({**manifest, "model": bad}))
        assert isinstance(run("show", "gemma-3-270m").exception, ModelError)


def test_from_the_shell_an_error_is_one_line_and_code_3(models_dir):
    done = subprocess.run(
        [sys.executable, "-m", "tokenpath.cli.main", "models", "show", "gema-3-270m"],
        env={**os.environ},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "'gema-3-270m' is no model that is known here; did you mean gemma-3-270m?\n"
    )
