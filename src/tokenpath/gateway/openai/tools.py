"""``tools`` and ``tool_choice`` of a chat request: checked, and as templates want them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jsonschema_rs
import msgspec

from tokenpath.gateway.openai.schema import ChatCompletionRequest, NamedTool, Tool
from tokenpath.models.dialects.constraint import (
    NO_ARGUMENTS,
    OfferedTool,
    call_constraint,
    held_shapes,
)
from tokenpath.models.dialects.detect import Dialect
from tokenpath.models.dialects.reader import Accepts
from tokenpath.models.dialects.shapes import Call, Shape
from tokenpath.protocol.calls import ThoughtFrame
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.grammar import Grammar
from tokenpath.router.served import ServedModel

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}
"""What a template is shown of a tool without parameters; many take it for granted."""


def check_tools(request: ChatCompletionRequest, grammar: Grammar | None) -> None:
    """Everything about tools that needs no model. Raises ``InvalidRequestError`` and its kinds.

    ``grammar`` is what the request's own fields say that the output must be.
    """
    first: dict[str, int] = {}
    for place, tool in enumerate(request.tools or ()):
        where = f"tools[{place}]"
        _check_tool(tool, where)
        name = tool.function.name if tool.function is not None else ""
        if name in first:
            raise InvalidRequestError(
                f"Field '{where}.function.name' is '{name}', as is that of tools[{first[name]}]; "
                "names must differ.",
                param=f"{where}.function.name",
            )
        first[name] = place
    _check_choice(request, first)
    if grammar is not None and request.tools and request.tool_choice != "none":
        raise InvalidRequestError(
            f"Field '{grammar.field}' says what the output must be, so that no tool could be "
            "called; leave out 'tools', or set 'tool_choice' to 'none'.",
            param=grammar.field,
        )


def _check_tool(tool: Tool, where: str) -> None:
    if tool.type != "function":
        raise UnsupportedError(
            f"Field '{where}.type' is not 'function', the only type of tool that is implemented.",
            param=f"{where}.type",
        )
    if tool.function is None:
        raise InvalidRequestError(
            f"Field '{where}.function' is required.", param=f"{where}.function"
        )
    if not _NAME.fullmatch(tool.function.name):
        raise InvalidRequestError(
            f"Field '{where}.function.name' must be 1 to 64 letters, digits, '_' or '-'.",
            param=f"{where}.function.name",
        )
    if tool.function.parameters is not None:
        _check_parameters(tool.function.parameters, f"{where}.function.parameters")


def _check_parameters(schema: Mapping[str, Any], where: str) -> None:
    def wrong(what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"Field '{where}' is not the JSON schema of an object: {what}.", param=where
        )

    if schema.get("type", "object") != "object":
        raise wrong("its 'type' must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong("its 'properties' must be an object")
    for schema_of in schema.get("properties", {}).values():
        if not isinstance(schema_of, dict | bool):
            raise wrong("each of its 'properties' must be a schema")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong("its 'required' must be a list of names")


def _check_choice(request: ChatCompletionRequest, names: Mapping[str, int]) -> None:
    choice = request.tool_choice
    if choice in (None, "none") or (choice == "auto" and not request.tools):
        return
    if not request.tools:
        raise InvalidRequestError(
            "Field 'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice"
        )
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise InvalidRequestError(
                f"Field 'tool_choice.function.name' is {name[:64]!r}, none of the 'tools'.",
                param="tool_choice.function.name",
            )


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """Calls that the engine holds to a grammar."""

    grammar: Grammar
    shapes: tuple[Shape, ...]
    """What is to be read as calls."""
    accepts: Accepts
    """Whether a call that was read is one."""


def held_calls(
    request: ChatCompletionRequest,
    dialect: Dialect,
    tools: Sequence[OfferedTool],
    *,
    thinking: bool,
) -> HeldCalls | None:
    """What ``tool_choice`` and ``strict`` promise about the calls; None if nothing.

    ``tools`` are those that ``offered_tools`` gave; ``thinking``: the prompt has opened the
    thoughts.
    """
    if not tools or dialect.calls is None:
        return None
    choice = request.tool_choice
    constraint = call_constraint(
        dialect.calls,
        tools,
        controls=dialect.controls,
        named=choice.function.name if isinstance(choice, NamedTool) else None,
        required=choice == "required",
        parallel=request.parallel_tool_calls is not False,
    )
    if constraint is None:
        return None
    if dialect.thoughts is not None:
        thoughts = ThoughtFrame(dialect.thoughts.open, dialect.thoughts.close, begun=thinking)
        constraint = msgspec.structs.replace(constraint, thoughts=thoughts)
    held = held_shapes(dialect.calls, required=constraint.required)
    return HeldCalls(
        Grammar.calls(constraint, field="tool_choice" if constraint.required else "tools"),
        held if constraint.required else dialect.calls.shapes,
        _Checked(held, {tool.name: tool.parameters for tool in tools if tool.strict}),
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """Takes a strict tool's call in a shape that the grammar leaves free only if it is right.

    A ``json`` block may be a call or an example in an answer, so the grammar cannot hold it.
    """

    held: Collection[Shape]
    strict: Mapping[str, Mapping[str, Any] | None]

    def __call__(self, shape: Shape, call: Call) -> bool:
        if shape in self.held or call.name not in self.strict:
            return True
        schema = dict(self.strict[call.name] or NO_ARGUMENTS)
        try:
            return jsonschema_rs.is_valid(schema, json.loads(call.arguments), offline=True)
        except ValueError:  # The engine takes the schema, but this library finds a fault with it.
            return False


def offered_tools(request: ChatCompletionRequest, model: ServedModel) -> Sequence[OfferedTool]:
    """The tools that the model may call.

    Raises ``InvalidRequestError`` if the request has tools and this model cannot call any.
    """
    if not request.tools or request.tool_choice == "none":
        return ()
    if not model.dialect.takes_tools:
        raise InvalidRequestError(
            f"Model '{model.name}' cannot call tools: its chat template has no place for them.",
            param="tools",
        )
    if model.dialect.calls is None:
        raise InvalidRequestError(
            f"Model '{model.name}' cannot call tools: it is not known how it writes calls; name a "
            "'tool_parser' for it in the spec.",
            param="tools",
        )
    return [
        OfferedTool(
            tool.function.name,
            tool.function.parameters,
            strict=bool(tool.function.strict),
            field=f"tools[{place}].function.parameters",
        )
        for place, tool in enumerate(request.tools)
        if tool.function is not None
    ]


def template_tools(request: ChatCompletionRequest) -> list[Mapping[str, Any]]:
    """The tools as templates read them: in one order of members, so that prompts are alike."""
    forms: list[Mapping[str, Any]] = []
    for tool in request.tools or ():
        if tool.function is not None:
            form: dict[str, Any] = {"name": tool.function.name}
            if tool.function.description is not None:
                form["description"] = tool.function.description
            form["parameters"] = tool.function.parameters or _NO_PARAMETERS
            forms.append({"type": "function", "function": form})
    return forms


def check_switches(request: ChatCompletionRequest, model: ServedModel) -> Mapping[str, Any]:
    """The template's switches that the request sets.

    Raises ``InvalidRequestError`` for one that this model's template does not have.
    """
    switches = request.chat_template_kwargs or {}
    for name in switches:
        if name not in model.dialect.switches:
            raise InvalidRequestError(
                f"Field 'chat_template_kwargs' has {name[:64]!r}, which the chat template of model "
                f"'{model.name}' does not use.",
                param="chat_template_kwargs",
            )
    return switches
