"""Dialects told by templates: known families, derived shapes, switches, marks that are tokens."""

import json
from pathlib import Path

import pytest

from tokenpath.models.dialects.derive import Probe, probe
from tokenpath.models.dialects.detect import PLAIN, dialect_of
from tokenpath.models.dialects.families import GEMMA, HERMES, LLAMA3, MISTRAL, MISTRAL_THINK, THINK
from tokenpath.models.dialects.reader import AnswerReader
from tokenpath.models.dialects.shapes import Call, Shape
from tokenpath.models.template import ChatTemplate
from tokenpath.protocol.errors import SpecError

HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"

HERMES_TEMPLATE = (
    HEAD + "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}" + TAIL
)
LLAMA_TEMPLATE = (
    "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}Respond with JSON. {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
)
MISTRAL_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA_TEMPLATE = (
    "{% if tools %}You have access to functions. {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)
TEXT_ARGUMENTS = (
    HEAD + "{% if m.tool_calls is defined %}<calls>{% for c in m.tool_calls %}<call>function<sep>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments + '' }}\n```</call>{% endfor %}</calls>{% endif %}"
    + TAIL
)
FUNCTION_TAGS = (
    HEAD + "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}" + TAIL
)
WHOLE_LIST = (
    HEAD + "{% if m.tool_calls %}<calls>{{ m.tool_calls | tojson }}</calls>{% endif %}" + TAIL
)
OTHER_KEYS = (
    HEAD + "{% if m.tool_calls %}Action: ```json\n[{% for c in m.tool_calls %}"
    '{"tool_name": {{ c.function.name | tojson }}, "inputs": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]\n```{% endif %}" + TAIL
)
XML = (
    HEAD + "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
    "</function></tool_call>{% endfor %}" + TAIL
)
SILENT = HEAD + TAIL


class Vocabulary:
    special_ids = frozenset({7, 8})

    def token_id(self, token):
        return {"[TOOL_CALLS]": 7, "<|python_tag|>": 8, "<tool_call>": 9, "</think>": 10}.get(token)


def dialect(source, **options):
    return dialect_of(ChatTemplate(source), Vocabulary(), **options)


def asked(source) -> Probe:
    template = ChatTemplate(source)
    return probe(lambda messages: template.render(messages, add_generation_prompt=False))


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (HERMES_TEMPLATE, HERMES),
        (LLAMA_TEMPLATE, LLAMA3),
        (MISTRAL_TEMPLATE, MISTRAL),
        (GEMMA_TEMPLATE, GEMMA),
    ],
)
def test_families(source, form):
    found = dialect(source)
    assert found.calls is form
    assert found.takes_tools
    assert not found.text_arguments


def test_only_marks_that_are_control_tokens_are_shown():
    assert dialect(MISTRAL_TEMPLATE).call_mark_ids == (7,)
    assert dialect(LLAMA_TEMPLATE).call_mark_ids == (8,)
    assert dialect(HERMES_TEMPLATE).call_mark_ids == ()


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (
            FUNCTION_TAGS,
            Shape(open="<function=", payload="named", between=">", close="</function>"),
        ),
        (
            TEXT_ARGUMENTS,
            Shape(
                open="<calls><call>function<sep>",
                payload="named",
                between="```json",
                join="```</call><call>function<sep>",
                close="```</call></calls>",
            ),
        ),
        (WHOLE_LIST, Shape(open="<calls>", close="</calls>")),
        (
            OTHER_KEYS,
            Shape(
                open="Action: ```json",
                close="```",
                name_key="tool_name",
                argument_keys=("inputs", "arguments", "parameters"),
            ),
        ),
    ],
)
def test_shapes_are_derived(source, shape):
    found = dialect(source)
    assert found.calls.name == "template"
    assert found.calls.shapes == (shape,)
    assert found.text_arguments == (source is TEXT_ARGUMENTS)


@pytest.mark.parametrize(
    "source",
    [
        HERMES_TEMPLATE,
        LLAMA_TEMPLATE,
        MISTRAL_TEMPLATE,
        FUNCTION_TAGS,
        TEXT_ARGUMENTS,
        WHOLE_LIST,
        OTHER_KEYS,
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_what_a_template_writes_is_read_back(source, number):
    """With the family's parser and with the derived one."""
    template, found = ChatTemplate(source), dialect(source)
    calls = [
        ("weather", '{"city": "Zürich", "days": [1, {"x": "</tool_call>\\"}"}]}'),
        ("time", "{}"),
    ][:number]
    if source is LLAMA_TEMPLATE:
        calls = calls[:1]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"abcdefgh{place}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": text if found.text_arguments else json.loads(text),
                },
            }
            for place, (name, text) in enumerate(calls)
        ],
    }
    user = {"role": "user", "content": "x"}
    with_calls = template.render([user, message], add_generation_prompt=False)
    start = len(template.render([user], add_generation_prompt=False))
    end = max(with_calls.rfind(mark) for mark in ("<|end|>", "<|eot_id|>", "</s>"))
    answer = with_calls[start:end]
    for opening in ("<|assistant|>", "<|start_header_id|>assistant<|end_header_id|>"):
        answer = answer.removeprefix(opening)
    for parser in ("auto", "template"):
        shapes = dialect(source, tool_parser=parser).calls.shapes
        reader = AnswerReader(shapes=shapes, tools=["weather", "time"])
        events = [
            event for character in answer for event in reader.push(character)
        ] + reader.finish()
        assert events == [Call(name, text) for name, text in calls], (parser, answer, shapes)


@pytest.mark.parametrize(
    "source",
    [XML, SILENT, "{{ 1 / 0 }}", "{{ messages[0].content }}", "{{ raise_exception('no') }}"],
)
def test_a_template_that_shows_no_calls_has_no_parser(source):
    assert asked(source).shapes == ()
    assert dialect(source).calls is None
    with pytest.raises(SpecError, match="does not show how the model writes tool calls"):
        dialect(source, tool_parser="template")


def test_the_spec_decides():
    assert dialect(SILENT, tool_parser="hermes").calls is HERMES
    assert dialect(HERMES_TEMPLATE, tool_parser="none").calls is None
    assert dialect(HERMES_TEMPLATE, tool_parser="template").calls.shapes == HERMES.shapes[:1]
    assert dialect(HERMES_TEMPLATE, reasoning_parser="mistral").thoughts == MISTRAL_THINK
    assert dialect(HERMES_TEMPLATE + "</think>", reasoning_parser="none").thoughts is None


def test_templates_that_take_no_tools():
    assert not dialect("{% for m in messages %}{{ m.content }}{% endfor %}").takes_tools
    assert dialect_of(None, Vocabulary()) is PLAIN


def test_reasoning():
    source = (
        SILENT + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    )
    found = dialect(source)
    assert found.thoughts == THINK
    assert found.thought_end_id == 10
    assert found.switches == {"enable_thinking"}
    template = ChatTemplate(source)
    user = [{"role": "user", "content": "x"}]
    assert found.opens_thoughts(template.render(user, enable_thinking=True))
    assert not found.opens_thoughts(template.render(user))
    assert dialect(SILENT).thoughts is None
    assert not dialect(SILENT).opens_thoughts("<think>")
    assert dialect(SILENT + "[THINK][/THINK]").thoughts == MISTRAL_THINK
    assert LLAMA_TEMPLATE.count("custom_tools") == 2
    assert dialect(LLAMA_TEMPLATE).switches == {"custom_tools"}


def test_the_example_for_gemma_is_read_back():
    source = (Path(__file__).parents[2] / "examples" / "gemma-tools.jinja").read_text()
    found, template = dialect(source), ChatTemplate(source, "<bos>")
    assert found.calls is GEMMA
    assert found.takes_tools
    arguments = {"city": "Zürich", "days": [1, "}"]}
    functions = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name in ("weather", "time")
    ]
    user = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompt = template.render([{"role": "system", "content": "Be brief."}, user], tools=tools)
    assert prompt.startswith("<bos><start_of_turn>user\nYou have access to functions.")
    assert prompt.endswith("\n\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n")
    answered = [user, {"role": "assistant", "content": "", "tool_calls": functions}]
    whole = template.render(answered, tools=tools, add_generation_prompt=False)
    answer = whole.removeprefix(template.render([user], tools=tools)).removesuffix(
        "<end_of_turn>\n"
    )
    reader = AnswerReader(shapes=found.calls.shapes, tools=["weather", "time"])
    events = [event for character in answer for event in reader.push(character)] + reader.finish()
    assert [(event.name, json.loads(event.arguments)) for event in events] == [
        ("weather", arguments),
        ("time", arguments),
    ]


@pytest.mark.real_model
def test_the_real_gemma_is_a_base_model(gemma_path):
    from tokenpath.models.local import open_model

    local = open_model(gemma_path)
    assert dialect_of(local.chat_template(), local.tokenizer()) is PLAIN
