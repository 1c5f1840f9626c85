"""YAML text to plain data that remembers where each key and value stood.

PyYAML's own constructor forgets positions, keeps the last of two equal keys and lets a few
anchors expand to gigabytes. This walk over its node tree does none of that, and collects what is
wrong instead of stopping at the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import yaml

MAX_VALUES = 10_000
"""Values in one document after aliases are expanded; a spec has some hundred."""

KeyPath = tuple[str | int, ...]

_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
# YAML 1.1 gives these a meaning that a spec has no use for; the text is what was meant.
_TEXT = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
_MERGE = "tag:yaml.org,2002:merge"
_MAPPING = "tag:yaml.org,2002:map"
_SEQUENCE = "tag:yaml.org,2002:seq"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in the file; both count from 1, as editors do."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong, and where."""

    position: Position
    path: KeyPath
    message: str

    def __str__(self) -> str:
        """``LINE:COLUMN: path.to.key: what is wrong``."""
        place = f"{self.position.line}:{self.position.column}"
        where = f"{dotted(self.path)}: " if self.path else ""
        return f"{place}: {where}{self.message}"


@dataclass(slots=True)
class Document:
    """The data of a YAML text with its positions, and what was wrong with it."""

    data: object = None
    values: dict[KeyPath, Position] = field(default_factory=dict)
    keys: dict[KeyPath, Position] = field(default_factory=dict)
    written: dict[KeyPath, str] = field(default_factory=dict)
    """Scalars that stood unquoted, as they were written: YAML reads ``no`` as false."""
    issues: list[Issue] = field(default_factory=list)

    def value_position(self, path: KeyPath) -> Position:
        """Where the value of ``path``, or of its nearest known parent, begins."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, Position(1, 1))

    def key_position(self, path: KeyPath) -> Position:
        """Where the last key of ``path`` is written."""
        return self.keys.get(path) or self.value_position(path)


def dotted(path: KeyPath) -> str:
    """``models[0].engine.threads``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def parse(text: str) -> Document:
    """Read one YAML document. Never raises: what is wrong is in ``issues``.

    After a syntax error ``data`` is None and the error is the only issue; otherwise ``data`` holds
    everything that could be understood.
    """
    document = Document()
    try:
        # The loader reads the beginning already, so this may fail on characters.
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            document.data = _Walker(loader, document).value(node, ())
    except yaml.MarkedYAMLError as error:
        document.issues.append(Issue(_marked(error), (), _syntax(error)))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        position = Position(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        document.issues.append(Issue(position, (), message))
    except RecursionError:
        document.issues = [Issue(Position(1, 1), (), "lists or groups are nested too deeply")]
    except _TooManyValuesError:
        message = f"more than {MAX_VALUES} values once the aliases (*name) are expanded"
        document.issues = [Issue(Position(1, 1), (), message)]
    return document


class _TooManyValuesError(Exception):
    pass


class _Walker:
    """Turns nodes into data, filling a document's positions and issues."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader = loader
        self._document = document
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._count_one()
        self._document.values[path] = _position(node)
        if id(node) in self._open:
            self._issue(node, path, "the alias refers to a value that contains it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS | _TEXT:
                return self._scalar(node, path)
        finally:
            self._open.discard(id(node))
        self._issue(node, path, f"the tag {node.tag} is not allowed here; write the value plainly")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        found: dict[str, object] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged.append(value_node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._issue(key_node, path, "a key must be a plain word, not a list or mapping")
                continue
            key = key_node.value
            child = (*path, key)
            if key in found:
                first = self._document.keys[child]
                self._issue(key_node, child, f"the key is already given on line {first.line}")
                continue
            self._document.keys[child] = _position(key_node)
            found[key] = self.value(value_node, child)
        for source in merged:
            self._merge(source, path, found)
        return found

    def _merge(self, source: yaml.Node, path: KeyPath, into: dict[str, object]) -> None:
        """``<<: *name``: keys of another mapping, unless given here."""
        self._count_one()
        if isinstance(source, yaml.SequenceNode) and source.tag == _SEQUENCE:
            for item in source.value:
                self._merge(item, path, into)
        elif isinstance(source, yaml.MappingNode) and id(source) not in self._open:
            kept = [
                (key, value)
                for key, value in source.value
                if not (isinstance(key, yaml.ScalarNode) and key.value in into)
            ]
            copy = yaml.MappingNode(source.tag, kept, source.start_mark, source.end_mark)
            self._open.add(id(source))
            into.update(self._mapping(copy, path))
            self._open.discard(id(source))
        else:
            self._issue(source, path, "<<: must be followed by an alias of another mapping")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        if node.style is None:
            self._document.written[path] = node.value
        if node.tag in _TEXT:
            return node.value
        try:
            value = self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._issue(node, path, "the value cannot be read; quote it if text is meant")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._issue(node, path, "must be a finite number")
            return None
        return value

    def _count_one(self) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooManyValuesError

    def _issue(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self._document.issues.append(Issue(_position(node), path, message))


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _marked(error: yaml.MarkedYAMLError) -> Position:
    mark = error.problem_mark or error.context_mark
    return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's words, except where a newcomer would not know what to do with them."""
    problem = error.problem or "not YAML"
    if r"'\t'" in problem:
        return "a tab stands where YAML allows only spaces; indent with spaces"
    if error.context == "expected a single document in the stream":
        return "a second document begins here (---); a spec is one document"
    if problem == "mapping values are not allowed here":
        return "a second ': ' on one line; quote the value, or start the key on a line of its own"
    if problem.startswith("found undefined alias"):
        return f"{problem.removeprefix('found ')}: no anchor (&name) of that name stands above"
    context = f"{error.context}, " if error.context else ""
    return f"not valid YAML: {context}{problem}"
