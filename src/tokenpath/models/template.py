"""Chat templates: Jinja programs that come with a model and turn messages into its prompt.

A template is code by whoever made the model, and it runs on text by whoever sends a request. It
therefore runs sandboxed: it cannot reach Python, files or the network, nor change what it is given.
What it writes is bounded in length. Its time is not: Jinja cannot be interrupted, so a template
with loops nested on purpose holds a processor until it is done. Serve templates as you would
install programs; the messages can only lengthen a loop as far as a request's body goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenpath.protocol.errors import InvalidRequestError, ModelFileError, SpecError

MAX_CHARACTERS = 32_000_000
"""Longest rendered prompt: eight million tokens, more than any model's context."""


def _local_now() -> datetime:
    return datetime.now(UTC).astimezone()


class ChatTemplate:
    """A compiled chat template. Rendering is thread-safe and keeps nothing between calls."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[], datetime] = _local_now,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        """Compile ``source``; ``now`` is the clock that templates see.

        Raises ``ModelFileError`` if it is no valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["dict"] = _new_dict
        environment.globals["namespace"] = _Namespace
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """Names that the template looks up: what it takes besides the messages."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_characters = max_characters

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for a conversation.

        ``add_generation_prompt`` opens the assistant's turn; ``extra`` are the template's own
        switches, such as Qwen 3's ``enable_thinking``. Encode the result with
        ``add_special=False``. Raises ``InvalidRequestError`` with the template's own words when it
        refuses the messages or stumbles over them, or when the result is too long.
        """
        variables = {
            **self._tokens,
            **extra,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > self._max_characters:
                    break
        except Exception as error:  # a template fails as any program does
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error
        if length > self._max_characters:
            raise InvalidRequestError(
                f"the rendered messages exceed {self._max_characters:,} characters",
                param="messages",
            )
        return "".join(pieces)


def read_chat_template(path: Path, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
    """A template from a file that the spec names.

    Raises ``SpecError`` if it cannot be read, ``ModelFileError`` if it is no valid Jinja.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the chat template {path} cannot be read: {error}") from error
    return ChatTemplate(source, bos_token, eos_token)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  the base class's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's ``namespace`` without names that begin with an underscore, a known way out."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a chat template may not set {name!r} on a namespace"
            )
        super().__setitem__(name, value)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for ``dict`` itself, which has attributes that a template should not see."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
