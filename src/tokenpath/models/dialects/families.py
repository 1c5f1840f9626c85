"""How the known families write tool calls and reasoning.

* **Hermes** (Qwen 2.5 and 3, Hermes, and most models tuned on their data): each call is an object
  between ``<tool_call>`` and ``</tool_call>``. Qwen 2.5 Coder was given the same template, but
  writes the object bare or in a ``json`` block, so these are read too.
* **Llama 3**: the answer is an object with ``name`` and ``parameters``, without marks or after
  ``<|python_tag|>``; several are separated by ``;``.
* **Mistral**: ``[TOOL_CALLS]``, then a list of objects (tokenizers up to version 7) or a name and
  its arguments, with ``[ARGS]`` between them from version 11 and a mark for each call.
* **Gemma** has no tokens for calls. Its prompting guide asks for ``{"name": …, "parameters": …}``
  as the whole answer, and its examples for a fenced ``tool_code`` block; a template that lists
  tools says which. Read are the bare object (or a list of them), and the blocks ``tool_code``
  (JSON, or one call written as Python), ``tool_call`` and ``json`` (JSON).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tokenpath.models.dialects.reader import Marks
from tokenpath.models.dialects.shapes import Shape

CallIds = Literal["openai", "nine"]
"""``openai``: ``call_`` and 24 letters and digits. ``nine``: nine letters and digits, the only ids
that Mistral's templates take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls."""

    name: str
    """The parser's name in the spec."""
    shapes: tuple[Shape, ...]
    """What is read as a call; the first is what a grammar makes the model write."""
    ids: CallIds = "openai"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be single tokens and must reach the reader."""
        texts = [
            text
            for shape in self.shapes
            for text in (shape.open, shape.between, shape.join, shape.close)
            if text
        ]
        return (*texts, "[ARGS]", "[CALL_ID]") if self.name == "mistral" else tuple(texts)


HERMES: Final = CallFormat(
    name="hermes",
    shapes=(
        Shape(open="<tool_call>", close="</tool_call>"),
        Shape(sure=False),
        Shape(open="```json", close="```", sure=False),
    ),
)
LLAMA3: Final = CallFormat(
    name="llama3_json",
    shapes=(
        Shape(sure=False, argument_keys=("parameters", "arguments")),
        Shape(open="<|python_tag|>", argument_keys=("parameters", "arguments")),
    ),
)
MISTRAL: Final = CallFormat(
    name="mistral", shapes=(Shape(open="[TOOL_CALLS]", payload="mistral"),), ids="nine"
)
_GEMMA_KEYS: Final = ("parameters", "arguments", "args")
GEMMA: Final = CallFormat(
    name="gemma",
    shapes=(
        Shape(sure=False, argument_keys=_GEMMA_KEYS),
        Shape(open="```tool_code", close="```", payload="code", argument_keys=_GEMMA_KEYS),
        Shape(open="```tool_call", close="```", argument_keys=_GEMMA_KEYS),
        Shape(open="```json", close="```", sure=False, argument_keys=_GEMMA_KEYS),
    ),
)
CALL_FORMATS: Final = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, GEMMA)}

THINK: Final = Marks("<think>", "</think>")
MISTRAL_THINK: Final = Marks("[THINK]", "[/THINK]")
THOUGHT_FORMATS: Final = {"think": THINK, "mistral": MISTRAL_THINK}
