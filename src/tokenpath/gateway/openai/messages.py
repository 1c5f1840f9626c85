"""Messages as chat templates read them.

Templates were written for what Hugging Face's library gives them: content as one string, and the
arguments of earlier calls as objects (by some as text), where OpenAI's API has text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenpath.gateway.openai.schema import Message, ToolCall
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError


def template_messages(
    messages: Sequence[Message], *, text_arguments: bool = False
) -> list[Mapping[str, Any]]:
    """A conversation in a template's form; ``text_arguments`` leaves calls' arguments as text.

    Raises ``InvalidRequestError`` or ``UnsupportedError`` with the place.
    """
    called: dict[str, str] = {}
    forms: list[Mapping[str, Any]] = []
    for place, message in enumerate(messages):
        form = _form(message, f"messages[{place}]", text_arguments=text_arguments)
        for call in message.tool_calls or ():
            called[call.id] = call.function.name
        if message.role == "tool" and message.name is None and message.tool_call_id in called:
            # OpenAI's API names the call that is answered, and some templates the tool.
            form["name"] = called[message.tool_call_id]
        forms.append(form)
    return forms


def _form(message: Message, param: str, *, text_arguments: bool) -> dict[str, Any]:
    form: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, param),
    }
    if message.name is not None:
        form["name"] = message.name
    if message.reasoning_content is not None:
        form["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        form["tool_calls"] = [
            _call(call, f"{param}.tool_calls[{place}]", text_arguments=text_arguments)
            for place, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    return form


def _call(call: ToolCall, param: str, *, text_arguments: bool) -> dict[str, Any]:
    text = call.function.arguments.strip() or "{}"
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        where = f"{param}.function.arguments"
        raise InvalidRequestError(
            f"Field '{where}' is not the text of a JSON object.", param=where
        ) from None
    function = {"name": call.function.name, "arguments": text if text_arguments else arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _text(message: Message, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "tool" or (message.role == "assistant" and message.tool_calls):
            return ""
        raise InvalidRequestError(
            f"Field '{param}.content' is required for role '{message.role}'.",
            param=f"{param}.content",
        )
    if not content:
        raise InvalidRequestError(
            f"Field '{param}.content' is an empty list; it needs at least one text part.",
            param=f"{param}.content",
        )
    for place, part in enumerate(content):
        where = f"{param}.content[{place}]"
        if part.type != "text":
            raise UnsupportedError(
                f"Field '{where}.type' is not 'text', the only type of part that is implemented.",
                param=f"{where}.type",
            )
        if part.text is None:
            raise InvalidRequestError(f"Field '{where}.text' is required.", param=f"{where}.text")
    return "\n".join(part.text or "" for part in content)
