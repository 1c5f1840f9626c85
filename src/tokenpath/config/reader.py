"""A spec file to a ``Spec``, or every reason why not, each with its line.

What the operator sees is ``FILE:LINE:COLUMN: path.to.key: what is wrong and what would be right``,
one line an error, all of them at once.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from pydantic import ValidationError

from tokenpath.config.explain import explain
from tokenpath.config.positions import Issue, Position, parse
from tokenpath.config.spec import Spec
from tokenpath.protocol.errors import SpecError

MAX_SPEC_BYTES = 256 * 1024
"""A larger file is no spec but something given by mistake."""

_SMALLEST = "the smallest spec is one line: 'models: [{source: gemma-3-270m}]'"


def load_spec(path: Path) -> Spec:
    """Read and validate a spec file.

    Raises ``SpecError`` whose message has one line for each error found.
    """
    return parse_spec(_text(path), name=str(path))


def default_spec() -> Spec:
    """The spec that ships with the package, served when none is named."""
    shipped = importlib.resources.files("tokenpath.config") / "default.yaml"
    return parse_spec(shipped.read_text(encoding="utf-8"), name="the shipped default.yaml")


def parse_spec(text: str, *, name: str) -> Spec:
    """Validate the text of a spec; ``name`` stands before each error. Raises ``SpecError``."""
    document = parse(text)
    if document.data is None and not document.issues:
        raise SpecError(f"{name} is empty; {_SMALLEST}")
    issues = list(document.issues)
    spec = None
    if document.data is not None:
        try:
            spec = Spec.model_validate(document.data, strict=True)
        except ValidationError as error:
            reported = {issue.path for issue in issues}
            issues += [i for i in explain(error, document) if i.path not in reported]
    if issues or spec is None:
        raise SpecError(_report(name, issues))
    return spec


def _report(name: str, issues: list[Issue]) -> str:
    ordered = sorted(issues, key=lambda issue: issue.position)
    return "\n".join(f"{name}:{issue}" for issue in ordered)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SPEC_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(f"there is no spec file {path}") from error
    except IsADirectoryError as error:
        raise SpecError(f"{path} is a folder; name the YAML file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"the spec file {path} cannot be read: {reason}") from error
    if len(raw) > MAX_SPEC_BYTES:
        raise SpecError(f"{path} is larger than {MAX_SPEC_BYTES // 1024} KiB, so it is no spec")
    if b"\0" in raw:
        raise SpecError(f"{path} is a binary file; a spec is YAML text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        position = Position(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        issue = Issue(position, (), f"byte 0x{raw[error.start]:02x} is not UTF-8; save it as UTF-8")
        raise SpecError(_report(str(path), [issue])) from error
