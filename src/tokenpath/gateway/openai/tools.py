"""``tools`` and ``tool_choice`` of a chat request: checked, and as templates want them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenpath.gateway.openai.schema import ChatCompletionRequest, NamedTool, Tool
from tokenpath.models.dialects.constraint import OfferedTool
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.router.served import ServedModel

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}
"""What a template is shown of a tool without parameters; many take it for granted."""


def check_tools(request: ChatCompletionRequest) -> None:
    """Everything about tools that needs no model. Raises ``InvalidRequestError`` and its kinds."""
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
    if tool.function.strict:
        _refuse_constraint(
            f"Field '{where}.function.strict'", "leave it out", f"{where}.function.strict"
        )


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
    if choice != "auto":
        _refuse_constraint("Field 'tool_choice' other than 'auto' and 'none'", "use 'auto'")


def _refuse_constraint(field: str, instead: str, param: str = "tool_choice") -> None:
    # The one place to join with structured output: ``call_constraint`` says what to allow.
    raise UnsupportedError(
        f"{field} needs output that is held to a grammar, which is not implemented; {instead}.",
        param=param,
    )


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
        OfferedTool(tool.function.name, tool.function.parameters, strict=bool(tool.function.strict))
        for tool in request.tools
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
