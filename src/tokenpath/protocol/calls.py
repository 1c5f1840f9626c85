"""What an answer that calls tools must look like, as data that travels to the engine.

``tool_choice: required`` or a named tool, and ``strict``, are promises about the output that only a
grammar over the tokens can keep. The gateway knows how a model writes calls, the engine has its
tokens; this is what the one tells the other: fixed text around objects of JSON schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class CallRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool's call: ``begin``, then JSON that satisfies ``schema``, then ``end``."""

    begin: str
    schema: Mapping[str, Any]
    end: str = ""
    strict: bool = False
    """Refuse a schema that cannot be enforced. If not, any object may then stand in its place."""
    field: str = "tools"
    """The request's field with the schema, for errors."""


class CallFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way to write calls: ``open``, then calls with ``join`` between them, then ``close``."""

    rules: tuple[CallRule, ...]
    trigger: str = ""
    """The beginning of ``open`` that free text must not contain. Empty: calls have no mark; free
    text then must not begin with the brace or bracket that a call begins with."""
    open: str = ""
    join: str = ""
    close: str = ""


class ThoughtFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reasoning that may come before all else."""

    open: str
    close: str
    begun: bool = False
    """The prompt has written ``open``: the answer begins within the thoughts, and leaves them."""


class CallConstraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All answers that are allowed."""

    frames: tuple[CallFrame, ...]
    """Where several are allowed at most one of them has no trigger."""
    required: bool
    """Whether the answer is calls and nothing else. If not, it may be text without calls, or text
    and then calls."""
    several: bool
    """Whether more than one call may come."""
    thoughts: ThoughtFrame | None = None
    controls: Mapping[str, int] = {}
    """Texts above that are control tokens, and their ids; they may be parts of longer texts."""
