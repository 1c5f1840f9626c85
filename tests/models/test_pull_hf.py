"""The Hugging Face Hub: which files are chosen, and a pull from a hub on loopback."""

import hashlib
import os
import subprocess
import sys
import time

import msgspec
import pytest
from loopback import FileServer, Recorder, sha256

from tokenpath.models import pull_hf
from tokenpath.models.library import MANIFEST
from tokenpath.models.spelling import HubSource
from tokenpath.protocol.errors import PullError

COMMIT = "c" * 40
WEIGHTS = os.urandom(400_000)
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickles are never read",
    "onnx/model.onnx": b"x",
}


@pytest.fixture
def server():
    with FileServer() as running:
        yield running


def git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def serve_hub(server, files=FILES, repository="org/name"):
    """As much of the hub's API as its client needs to list and fetch files."""
    siblings = []
    for name, data in files.items():
        path = f"/{repository}/resolve/{COMMIT}/{name}"
        server.files[path] = data
        large = len(data) > 100_000
        lfs = {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 1}}
        siblings.append(
            {
                "rfilename": name,
                "size": len(data),
                "blobId": git_id(data),
                **(lfs if large else {}),
            }
        )
    info = {"id": repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
    for suffix in ("", "/revision/v1"):
        path = f"/api/models/{repository}{suffix}"
        server.files[path] = msgspec.json.encode(info)
        server.headers[path]["Content-Type"] = "application/json"


@pytest.fixture
def pull(server, tmp_path):
    def run(source=HubSource("org/name"), progress=None):  # noqa: B008 - frozen
        return pull_hf.pull_hub(
            source, workspace=tmp_path, progress=progress or Recorder(), endpoint=server.url
        )

    return run


def test_a_repository_of_safetensors(server, pull):
    serve_hub(server)
    progress = Recorder()
    staged = pull(progress=progress)
    found = {p.name: p.read_bytes() for p in staged.folder.rglob("*") if p.is_file()}
    assert found == {n: FILES[n] for n in ("config.json", "tokenizer.json", "model.safetensors")}
    assert (staged.model, staged.origin) == (".", f"hf:org/name@{COMMIT}")
    assert progress.done == progress.total == sum(map(len, found.values()))


def test_one_gguf_of_a_revision(server, pull):
    serve_hub(server, {"a-Q4.gguf": WEIGHTS, "a-Q8.gguf": b"x"})
    staged = pull(HubSource("org/name", "v1", "a-Q4.gguf"))
    assert staged.model == "a-Q4.gguf"
    assert (staged.folder / staged.model).read_bytes() == WEIGHTS
    assert not any("Q8" in path for path, _ in server.gets)


def test_goes_on_with_what_an_earlier_run_left(server, pull, tmp_path):
    serve_hub(server)
    path = f"/org/name/resolve/{COMMIT}/model.safetensors"
    server.script[path] = ["cut:150000", "404"]
    with pytest.raises(PullError, match="404"):
        pull()
    server.script.clear()
    server.gets.clear()
    progress = Recorder()
    staged = pull(progress=progress)
    assert (staged.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (path, "bytes=150000-") in server.gets
    assert progress.done == progress.total


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_the_hub_lists_are_not_kept(server, pull, tmp_path, name):
    serve_hub(server)
    path = f"/org/name/resolve/{COMMIT}/{name}"
    server.files[path] = b"x" * len(server.files[path])
    with pytest.raises(PullError, match="it was not kept"):
        pull()
    assert not list(tmp_path.rglob(f"{name}*"))


def test_a_gated_model_says_what_to_do(server, pull):
    serve_hub(server)
    server.script[f"/org/name/resolve/{COMMIT}/config.json"] = ["403"]
    with pytest.raises(PullError, match="accept the model's licence on the hub and set HF_TOKEN"):
        pull()


def test_the_token_goes_to_the_hub(server, pull, monkeypatch):
    serve_hub(server)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull()
    assert set(server.tokens) == {"Bearer hf_secret"}


def test_no_such_repository(server, pull):
    server.script["/api/models/org/name"] = ["404"]
    with pytest.raises(PullError, match="org/name") as caught:
        pull()
    assert "\n" not in caught.value.message


def test_the_hub_is_broken(server, pull):
    server.script["/api/models/org/name"] = ["500"] * 20
    with pytest.raises(PullError, match="the hub answered 500 for hf:org/name"):
        pull()


def test_nobody_listening_is_one_quick_sentence(tmp_path):
    began = time.monotonic()
    with pytest.raises(PullError, match="hf:org/name could not be fetched from the hub") as caught:
        pull_hf.pull_hub(
            HubSource("org/name"),
            workspace=tmp_path,
            progress=Recorder(),
            endpoint="http://127.0.0.1:1",
        )
    assert time.monotonic() - began < 20
    assert "\n" not in caught.value.message


def test_on_the_command_line_a_machine_without_the_hub_gets_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tokenpath.cli.main", "models", "pull", "hf:org/name"],
        env={
            **os.environ,
            "HF_ENDPOINT": "http://127.0.0.1:1",
            "TOKENPATH_MODELS": str(tmp_path / "models"),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "hf:org/name could not be fetched from the hub" in done.stderr


def test_a_full_model_through_the_front_door(server, tmp_path):
    serve_hub(server)
    done = subprocess.run(
        [sys.executable, "-m", "tokenpath.cli.main", "models", "pull", "hf:org/name@v1"],
        env={**os.environ, "HF_ENDPOINT": server.url, "TOKENPATH_MODELS": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    folder = tmp_path / "hf+org--name@v1"
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        MANIFEST,
    }


class TestChooseFiles:
    def choose(self, names, file=None):
        return pull_hf.choose_files(sorted(names), HubSource("org/name", None, file))

    def test_safetensors_before_gguf(self):
        names = ["config.json", "model.safetensors", "m.gguf", "README.md", "tokenizer.model"]
        assert self.choose(names) == ["config.json", "model.safetensors", "tokenizer.model"]

    def test_shards_with_their_index_and_an_embedding_models_pooling(self):
        names = [
            "1_Pooling/config.json",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        assert self.choose([*names, "openvino/config.json", "training.bin"]) == names

    def test_mistrals_second_copy_of_the_weights_is_left(self):
        names = ["config.json", "consolidated.safetensors", "model.safetensors"]
        assert self.choose(names) == ["config.json", "model.safetensors"]
        assert "consolidated.safetensors" in self.choose(names[:2])

    def test_the_only_gguf(self):
        assert self.choose(["README.md", "m.gguf"]) == ["m.gguf"]

    def test_all_shards_of_a_split_gguf(self):
        names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
        assert self.choose(names) == names
        assert self.choose([*names, "x.gguf"], names[0]) == names
        with pytest.raises(PullError, match="lacks m-00002-of-00002"):
            self.choose(names[:1])

    @pytest.mark.parametrize(
        ("names", "file", "message"),
        [
            (["a.gguf", "b.gguf"], None, "name one, as in hf:org/name:a.gguf .others: b.gguf"),
            (["pytorch_model.bin", "config.json"], None, "other formats are not read"),
            ([], None, "neither"),
            (["m-Q4_K_M.gguf"], "m-q4_k_m.gguf", "did you mean m-Q4_K_M.gguf"),
            (["a.gguf"], "zzz", "has no file zzz"),
            (["a.safetensors"], "a.safetensors", "not a GGUF"),
        ],
    )
    def test_what_cannot_be_chosen(self, names, file, message):
        with pytest.raises(PullError, match=message):
            self.choose(names, file)
