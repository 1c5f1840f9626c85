"""Gives each rival an environment of its own, with pinned packages, once.

    python -m bench.peers.install [RIVAL …]

A rival that cannot be installed is told with the reason, and the others go on. PyTorch's CUDA
build, which would be gigabytes, is refused before anything is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench.peers.places import environment_dir, peers_dir
from bench.peers.rivals import OURS, RIVALS, Program, Rival

_PIP = "pip==26.3"
"""Older ones download whole wheels to learn what they depend on."""
_CUDA = ("nvidia-", "cuda-")


class UnavailableError(Exception):
    """A rival or a form of the model that cannot be had here; the sentence says why."""


def ensure(rival_name: str) -> None:
    """Make the environment unless it is there with these very packages.

    Raises ``UnavailableError``.
    """
    if rival_name == OURS:
        return
    rival = RIVALS[rival_name]
    folder = environment_dir(rival.name)
    marker = folder / ".packages"
    wanted = _description(rival)
    if marker.is_file() and marker.read_text() == wanted:
        return
    say(f"{rival.name}: installing {', '.join(rival.packages)} ({rival.needs})")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    log = folder.parent / f"{rival.name}.log"
    with log.open("w") as out:
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        _run([sys.executable, "-m", "venv", str(folder)], out.name, rival)
        _run([*pip, "install", "--quiet", "--upgrade", _PIP], out.name, rival)
        _refuse_cuda(pip, rival)
        # What pip once compiled with other settings must not be taken out of its cache.
        fresh = ["--no-cache-dir"] if rival.build else []
        _run([*pip, "install", *fresh, *rival.packages], out.name, rival)
        if rival.unwanted:
            _run([*pip, "uninstall", "--yes", *rival.unwanted], out.name, rival)
        if rival.program:
            _compile(rival.program, folder, pip, out.name, rival)
    marker.write_text(wanted)


def _description(rival: Rival) -> str:
    lines = [*rival.packages, *(f"without {name}" for name in rival.unwanted)]
    lines += [f"{name}={value}" for name, value in rival.build.items()]
    if rival.program:
        lines += [f"compiled {rival.program.target} of {rival.program.source}"]
        lines += rival.program.options
    return "\n".join(lines)


def _compile(program: Program, folder: Path, pip: list[str], log: str, rival: Rival) -> None:
    """Fetch the source, build the one target, and keep only it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetched = Path(scratch)
        name = program.source.partition("==")[0]
        _run(
            [*pip, "download", "--no-deps", f"--no-binary={name}", f"--dest={fetched}",
             program.source], log, rival,
        )  # fmt: skip
        (archive,) = fetched.iterdir()
        shutil.unpack_archive(archive, fetched, filter="data")
        source = archive.with_suffix("").with_suffix("") / program.folder
        build = fetched / "build"
        tools = folder / "bin"
        _run(
            [str(tools / "cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja",
             f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release",
             *program.options], log, rival,
        )  # fmt: skip
        _run([str(tools / "ninja"), "-C", str(build), program.target], log, rival)
        shutil.copy2(build / "bin" / program.target, tools / program.target)


def _run(command: list[str], log: str, rival: Rival) -> None:
    with Path(log).open("a") as out:
        done = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | rival.build,
            check=False,
        )
    if done.returncode:
        raise UnavailableError(f"cannot be installed: {last_line(Path(log))} (all of it: {log})")


def _refuse_cuda(pip: list[str], rival: Rival) -> None:
    if not any("torch" in package or "vllm" in package for package in rival.packages):
        return
    planned = subprocess.run(
        [*pip, "install", "--dry-run", "--quiet", "--report", "-", *rival.packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if planned.returncode:
        reason = planned.stderr.strip().splitlines() or ["pip found no way to install it"]
        raise UnavailableError(f"cannot be installed: {reason[-1]}")
    names = [item["metadata"]["name"] for item in json.loads(planned.stdout)["install"]]
    found = [name for name in names if name.startswith(_CUDA)]
    if found:
        raise UnavailableError(
            f"would bring {found[0]} and {len(found) - 1} more packages of CUDA; "
            "give pip an index with PyTorch's CPU build (PIP_EXTRA_INDEX_URL)"
        )


def last_line(log: Path) -> str:
    """The last thing that a failed command said."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    return (errors or lines or ["it said nothing"])[-1]


def say(sentence: str) -> None:
    """Progress, for people."""
    print(sentence, file=sys.stderr, flush=True)


def main(arguments: Iterable[str] | None = None) -> int:
    """Install all rivals, or those named. 1 if one could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rivals", nargs="*", metavar="RIVAL", help=", ".join(RIVALS))
    names = parser.parse_args(arguments and list(arguments)).rivals or list(RIVALS)
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no rival; rivals are {', '.join(RIVALS)}")
    failed = 0
    for name in names:
        try:
            ensure(name)
            say(f"{name}: ready")
        except UnavailableError as error:
            failed += 1
            say(f"{name}: {error}")
    say(f"environments are in {peers_dir()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
