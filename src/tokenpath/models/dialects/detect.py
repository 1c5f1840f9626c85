"""Which dialect a model speaks: told by its template, its tokenizer and the spec.

Everything is found once, when a model is opened; a request only reads the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tokenpath.config.spec import ReasoningParser, ToolParser
from tokenpath.models.dialects.derive import Probe, probe
from tokenpath.models.dialects.families import (
    CALL_FORMATS,
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_THINK,
    THINK,
    THOUGHT_FORMATS,
    CallFormat,
)
from tokenpath.models.dialects.reader import Marks
from tokenpath.protocol.errors import SpecError


class Template(Protocol):
    """What is looked at of a chat template; ``models.template.ChatTemplate`` is one."""

    @property
    def source(self) -> str:
        """Its Jinja text."""
        ...

    @property
    def variables(self) -> frozenset[str]:
        """Names that it looks up."""
        ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = ...
    ) -> str:
        """The prompt's text."""
        ...


class Vocabulary(Protocol):
    """What is looked at of a tokenizer; ``models.tokenizer.Tokenizer`` is one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which have no text in an answer."""
        ...

    def token_id(self, token: str, /) -> int | None:
        """The id of a token by its text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one served model writes calls and reasoning, and what its template takes."""

    calls: CallFormat | None = None
    """None: it cannot call tools, or nobody knows how it writes calls."""
    thoughts: Marks | None = None
    """None: its reasoning, if there is any, is part of its text."""
    takes_tools: bool = False
    """Whether the template shows tools to the model."""
    text_arguments: bool = False
    """Whether the template wants the arguments of earlier calls as JSON text, not as an object."""
    switches: frozenset[str] = frozenset()
    """The template's own variables, which ``chat_template_kwargs`` may set."""
    call_mark_ids: tuple[int, ...] = ()
    """Control tokens that are marks of calls: their text must reach the reader."""
    thought_mark_ids: tuple[int, ...] = ()
    """Control tokens that are marks of reasoning."""
    controls: Mapping[str, int] = field(default_factory=dict)
    """The texts of all these tokens, and their ids."""
    thought_end_id: int | None = None
    """The token that ends the reasoning, where it is one token: it makes the count exact."""

    def opens_thoughts(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within the thoughts."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.open)


PLAIN = Dialect()
"""Text and nothing else."""
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables that are not for clients to set."""


def dialect_of(
    template: Template | None,
    vocabulary: Vocabulary,
    *,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> Dialect:
    """The dialect of a model with this template and tokenizer.

    Raises ``SpecError`` if the parser ``template`` was named and the template shows no calls.
    """
    if template is None:
        return PLAIN
    told = probe(partial(template.render, add_generation_prompt=False))
    calls = _call_format(template, told, tool_parser)
    thoughts = _thoughts(template.source, reasoning_parser)

    def special(texts: Sequence[str]) -> dict[str, int]:
        ids = {text: vocabulary.token_id(text) for text in texts}
        return {text: i for text, i in ids.items() if i is not None and i in vocabulary.special_ids}

    call_marks = {} if calls is None else special(calls.marks)
    thought_marks = {} if thoughts is None else special((thoughts.open, thoughts.close))
    return Dialect(
        calls=calls,
        thoughts=thoughts,
        takes_tools="tools" in template.variables,
        text_arguments=told.text_arguments,
        switches=template.variables - _GIVEN,
        call_mark_ids=tuple(call_marks.values()),
        thought_mark_ids=tuple(thought_marks.values()),
        controls=call_marks | thought_marks,
        thought_end_id=None if thoughts is None else vocabulary.token_id(thoughts.close),
    )


def _call_format(template: Template, told: Probe, parser: ToolParser) -> CallFormat | None:
    if parser == "none":
        return None
    if parser == "template" and not told.shapes:
        raise SpecError(
            "the chat template does not show how the model writes tool calls; name another "
            "tool_parser",
            param="tool_parser",
        )
    derived = CallFormat(name="template", shapes=told.shapes) if told.shapes else None
    if parser == "template":
        return derived
    if parser != "auto":
        return CALL_FORMATS[parser]
    return _known(template.source, told) or derived


def _known(source: str, told: Probe) -> CallFormat | None:
    """A family, by marks that no other has."""
    if HERMES.shapes[0] in told.shapes:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if any(shape.open not in ("", "<|python_tag|>") for shape in told.shapes):
        return None  # the template shows other marks than the families below have
    if "<|python_tag|>" in source or "<|start_header_id|>" in source:
        return LLAMA3 if "tools" in source else None
    if "<start_of_turn>" in source and "tools" in source:
        return GEMMA
    return None


def _thoughts(source: str, parser: ReasoningParser) -> Marks | None:
    if parser == "none":
        return None
    if parser != "auto":
        return THOUGHT_FORMATS[parser]
    for marks in (THINK, MISTRAL_THINK):
        if marks.close in source:
            return marks
    return None
