"""Makes the form of a model that a contender wants, once, and keeps it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.peers.install import UnavailableError, ensure, last_line, say
from bench.peers.places import REPOSITORY, model_dir, python_of
from bench.peers.rivals import FORMS


def ensure_form(name: str | None, model: str, source: Path) -> Path:
    """The file or folder of a form, made from ``source`` (the model as it was pulled) if need be.

    None is the model itself. Raises ``UnavailableError`` if a step towards it fails.
    """
    if name is None:
        return source
    form = FORMS[name]
    target = model_dir(model) / form.file
    if target.exists():
        return target
    made_from = ensure_form(form.made_from, model, source)
    ensure(form.rival)
    say(f"{model}: making {form.name} from {made_from.name}")
    partial = target.with_name(f"partial-{target.name}")
    log = target.with_name(f"{target.name}.log")
    _remove(partial)
    with log.open("w") as out, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        paths = {"{source}": str(made_from), "{target}": str(partial), "{scratch}": scratch}
        arguments = [paths.get(argument, argument) for argument in form.arguments]
        command = [str(python_of(form.rival)), "-m", form.module, *arguments]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        _remove(partial)
        raise UnavailableError(
            f"{form.name} cannot be made of {made_from.name}: {last_line(log)} (all of it: {log})"
        )
    partial.rename(target)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
