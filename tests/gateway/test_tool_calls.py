"""Tools and reasoning over HTTP: OpenAI's client gets calls as OpenAI sends them; wrong tools are told."""

from __future__ import annotations

import json

import msgspec
import openai
import pytest
from gateway_harness import Script, serving
from test_wrong_requests import CHAT, check, post

from tokenpath.models.dialects.detect import Dialect
from tokenpath.models.dialects.families import HERMES, MISTRAL, THINK
from tokenpath.models.template import ChatTemplate
from tokenpath.protocol.calls import CallConstraint, ThoughtFrame

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}"
    "{% if m.name %} {{ m.name }}{% endif %}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant: {% if enable_thinking %}<think>\n{% endif %}"
)
DIALECT = Dialect(
    calls=HERMES,
    thoughts=THINK,
    takes_tools=True,
    switches=frozenset({"enable_thinking"}),
    call_mark_ids=(8, 9),
    thought_mark_ids=(7,),
    thought_end_id=3,
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
USER = [{"role": "user", "content": "Hi"}]
ARGUMENTS = '{"city":  "Z\\u00fcrich </tool_call> {\\"x\\"}"}'
CALLS = (
    f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def module_server():
    with serving(template=ChatTemplate(TEMPLATE), dialect=DIALECT) as served:
        yield served


def say(server, text, size=3):
    """The model says this, so many characters a token."""
    server.replica.script = Script(tuple(text[i : i + size] for i in range(0, len(text), size)))


def ask(server, **options):
    options = {"messages": USER, "tools": TOOLS} | options
    return server.client().chat.completions.create(model="toy", **options)


def streamed(server, **options):
    """A streamed answer: each choice's text, thoughts, calls by index, and finish reasons."""
    found = {}
    for chunk in ask(server, stream=True, **options):
        for choice in chunk.choices:
            text, thoughts, calls, ends = found.setdefault(choice.index, ([], [], {}, []))
            delta = choice.delta
            text.append(delta.content or "")
            thoughts.append(getattr(delta, "reasoning_content", None) or "")
            for call in delta.tool_calls or []:
                if call.index not in calls:
                    assert call.id
                    assert call.type == "function"
                    assert call.function.arguments == ""
                    calls[call.index] = [call.id, call.function.name, ""]
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                    calls[call.index][2] += call.function.arguments
            ends += [choice.finish_reason] if choice.finish_reason else []
    return {
        index: ("".join(text), "".join(thoughts), calls, ends)
        for index, (text, thoughts, calls, ends) in found.items()
    }


@pytest.mark.parametrize("size", [1, 5, 1_000])
def test_calls_whole_and_streamed(server, size):
    say(server, CALLS, size)
    choice = ask(server).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == (
        "function",
        "weather",
        ARGUMENTS,
    )
    assert (second.function.name, second.function.arguments) == ("time", "{}")
    assert first.id.startswith("call_")
    assert first.id != second.id
    text, thoughts, calls, ends = streamed(server)[0]
    assert (text, thoughts, ends) == ("Let me see.", "", ["tool_calls"])
    assert {index: call[1:] for index, call in calls.items()} == {
        0: ["weather", ARGUMENTS],
        1: ["time", "{}"],
    }
    assert len({call[0] for call in calls.values()}) == 2


def test_a_call_alone_has_no_content(server):
    say(server, '<tool_call>{"name": "time", "arguments": {}}</tool_call>')
    answer = post(server, CHAT, {"model": "toy", "messages": USER, "tools": TOOLS}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message
    assert len(message["tool_calls"]) == 1


def test_the_sdks_own_accumulation(server):
    say(server, CALLS)
    with server.client().chat.completions.stream(model="toy", messages=USER, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert events.count("tool_calls.function.arguments.done") == 2
    assert message.content == "Let me see."
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS, "{}"]


def test_only_one_call_where_only_one_is_allowed(server):
    say(server, CALLS)
    message = ask(server, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    assert list(streamed(server, parallel_tool_calls=False)[0][2]) == [0]
    assert len(ask(server, parallel_tool_calls=True).choices[0].message.tool_calls) == 2


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}',
        "<tool_call> is a mark.",
        "Hello.\n",
    ],
)
def test_what_is_no_call_is_content(server, text):
    say(server, text)
    choice = ask(server).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert choice.message.tool_calls is None
    assert streamed(server)[0] == (text, "", {}, ["stop"])


def test_a_call_that_is_cut_off_is_content_and_says_length(server):
    say(server, '<tool_call>{"name": "time", "arguments": {}}</tool_call>', size=10)
    choice = ask(server, max_tokens=3).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == '<tool_call>{"name": "time", "a'


def test_without_tools_calls_are_content(server):
    text = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    say(server, text)
    for options in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
        assert ask(server, **options).choices[0].message.content == text
        request = server.replica.requests[-1]
        assert b"weather" not in bytes(request.prompt.token_ids)
        assert request.sampling.shown_token_ids == (7,)


def test_the_template_is_shown_the_tools_and_marks_are_let_through(server):
    ask(server, tool_choice="auto")
    request = server.replica.requests[-1]
    prompt = bytes(request.prompt.token_ids).decode()
    shown, end = json.JSONDecoder().raw_decode(prompt)
    assert shown[0] == WEATHER
    assert shown[1]["function"] == {
        "name": "time",
        "parameters": {"type": "object", "properties": {}},
    }
    assert prompt[end:] == "user: Hi\nassistant: "
    assert request.sampling.shown_token_ids == (7, 8, 9)


def test_choices_stop_strings_and_logprobs_go_on_working(server):
    say(server, CALLS, size=7)
    answer = ask(server, n=2, logprobs=True, top_logprobs=1)
    for choice in answer.choices:
        assert len(choice.message.tool_calls) == 2
        assert "".join(entry.token for entry in choice.logprobs.content) == CALLS
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    found = streamed(server, n=2, logprobs=True, stop=["never"])
    assert {index: len(one[2]) for index, one in found.items()} == {0: 2, 1: 2}
    tokens = ""
    for chunk in ask(server, stream=True, logprobs=True):
        for choice in chunk.choices:
            if choice.logprobs:
                tokens += "".join(entry.token for entry in choice.logprobs.content)
    assert tokens == CALLS


def test_the_conversation_goes_back_to_the_template(server):
    say(server, "3 degrees.")
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm. ",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": ARGUMENTS},
                },
                {"id": "b", "type": "function", "function": {"name": "time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
        {"role": "tool", "tool_call_id": "b"},
    ]
    assert ask(server, messages=messages).choices[0].message.content == "3 degrees."
    prompt = bytes(server.replica.requests[-1].prompt.token_ids).decode()
    city = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)
    assert prompt.endswith(
        f'assistant: Hm. <tool_call>{{"name": "weather", "arguments": {city}}}</tool_call>'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
        "tool weather: cold\ntool time: \nassistant: "
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", "3", '{"a": 1} x'])
def test_arguments_that_are_no_object_are_told(server, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"model": "toy", "messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}
    param = "messages[1].tool_calls[0].function.arguments"
    check(post(server, CHAT, body), 400, "invalid_request", param, "not the text of a JSON object")


def test_reasoning_whole_and_streamed(server):
    say(server, "<think>\nHm, <tool_call>\n</think>\n\nYes.", size=4)  # token 3 is not the end mark
    choice = ask(server).choices[0]
    assert choice.message.reasoning_content == "Hm, <tool_call>"
    assert choice.message.content == "Yes."
    assert streamed(server)[0] == ("Yes.", "Hm, <tool_call>", {}, ["stop"])


def test_reasoning_tokens_are_counted(server):
    server.replica.script = Script(
        ("<think>", "Hm", "</think>", "Yes", ".")
    )  # the third is token 3
    usage = ask(server, n=2, tools=openai.omit).usage
    assert usage.completion_tokens_details.reasoning_tokens == 6
    *_, last = ask(server, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == 3
    assert last.usage.completion_tokens == 5
    server.replica.script = Script(("Yes", "."))
    assert ask(server).usage.completion_tokens_details.reasoning_tokens == 0


def test_a_prompt_that_opens_the_thoughts(server):
    say(server, "Hm.\n</think>\n\nYes.")
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ask(server, **options).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    assert streamed(server, **options)[0][:2] == ("Yes.", "Hm.")
    assert ask(server).choices[0].message.content == "Hm.\n</think>\n\nYes."
    say(server, "Hm")
    assert ask(server, **options).choices[0].message.content is None


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "expected a list"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "required"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name", "is 'time', as is that of tools[0]"),
        ({"tools": [tool(name="get weather")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(name="größe")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "an object"),
        (
            {"tools": [tool(parameters={"type": "string"})]},
            "tools[0].function.parameters",
            "'type' must be",
        ),
        (
            {"tools": [tool(parameters={"properties": []})]},
            "tools[0].function.parameters",
            "'properties' must",
        ),
        (
            {"tools": [tool(parameters={"properties": {"a": 1}})]},
            "tools[0].function.parameters",
            "a schema",
        ),
        (
            {"tools": [tool(parameters={"required": "a"})]},
            "tools[0].function.parameters",
            "list of names",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "not valid"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            "tool_choice",
            "no 'tools'",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function", "required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nobody"}}, "tools": TOOLS},
            "tool_choice.function.name",
            "'nobody', none of the 'tools'",
        ),
        ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls", "boolean"),
        (
            {"chat_template_kwargs": {"colour": 1}},
            "chat_template_kwargs",
            "'colour', which the chat template",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages', which"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "an object"),
    ],
)
def test_wrong_tools(server, fields, param, says):
    answer = post(server, CHAT, {"model": "toy", "messages": USER, **fields})
    check(answer, 400, "invalid_request", param, says)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["yes", "no"]},
    ],
)
def test_a_form_of_the_output_and_tools_exclude_each_other(server, fields):
    body = {"model": "toy", "messages": USER, "tools": TOOLS, **fields}
    (param,) = fields
    param = "structured_outputs.regex" if param == "structured_outputs" else param
    check(post(server, CHAT, body), 400, "invalid_request", param, "no tool could be called")
    for free in ({"tool_choice": "none"}, {"tools": []}):
        assert post(server, CHAT, body | free).status_code == 200


def test_what_excludes_a_grammar_excludes_held_calls(server):
    body = {"model": "toy", "messages": USER, "tools": TOOLS, "ignore_eos": True}
    assert post(server, CHAT, body).status_code == 200
    answer = post(server, CHAT, body | {"tool_choice": "required"})
    check(answer, 400, "invalid_request", "ignore_eos", "cannot be combined with 'tool_choice'")


def held(server, **fields):
    """The constraint that reached the engine."""
    assert post(server, CHAT, {"model": "toy", "messages": USER, **fields}).status_code == 200
    grammar = server.replica.requests[-1].sampling.grammar
    return grammar and msgspec.json.decode(grammar.source, type=CallConstraint)


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "time"}}


def test_what_is_promised_reaches_the_engine(server):
    assert held(server, tools=TOOLS) is None
    assert held(server, tools=[STRICT], tool_choice="none") is None
    required = held(server, tools=TOOLS, tool_choice="required")
    assert (required.required, required.several) == (True, True)
    assert required.thoughts == ThoughtFrame("<think>", "</think>")
    assert [rule.strict for rule in required.frames[0].rules] == [False, False]
    once = held(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not once.several
    named = held(server, tools=TOOLS, tool_choice=NAMED)
    assert len(named.frames[0].rules) == 1
    strict = held(server, tools=[TIME, STRICT])
    assert not strict.required
    assert [rule.strict for rule in strict.frames[0].rules] == [False, True]
    assert strict.frames[0].rules[1].field == "tools[1].function.parameters"
    begun = held(
        server,
        tools=TOOLS,
        tool_choice="required",
        chat_template_kwargs={"enable_thinking": True},
    )
    assert begun.thoughts.begun


def test_a_named_call_ends_with_stop_as_openais_does(server):
    say(server, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    for choice, end in (("required", "tool_calls"), (NAMED, "stop")):
        answer = ask(server, tool_choice=choice).choices[0]
        assert (answer.finish_reason, len(answer.message.tool_calls)) == (end, 1)
        assert streamed(server, tool_choice=choice)[0][3] == [end]


def test_a_strict_tools_call_in_a_free_block_counts_if_it_satisfies_the_schema(server):
    call = '```json\n{"name": "weather", "arguments": {"city": "Paris"}}\n```'
    wrong = call.replace('"Paris"', "7")
    for text, counts in ((call, True), (wrong, False)):
        say(server, text)
        assert ask(server).choices[0].finish_reason == "tool_calls"
        strict = ask(server, tools=[STRICT]).choices[0]
        assert (strict.finish_reason == "tool_calls") == counts
        assert strict.message.content == (None if counts else text)


@pytest.mark.parametrize(
    ("template", "dialect", "param", "says"),
    [
        (None, Dialect(), "model", "has no chat template"),
        ("toy", Dialect(), "tools", "its chat template has no place for them"),
        ("toy", Dialect(takes_tools=True), "tools", "name a 'tool_parser' for it"),
    ],
)
def test_models_that_cannot_call_tools(template, dialect, param, says):
    with serving(template=template, dialect=dialect) as server:
        answer = post(server, CHAT, {"model": "toy", "messages": USER, "tools": TOOLS})
        check(answer, 400, "invalid_request", param, says)
        answer = post(server, CHAT, {"model": "toy", "messages": USER, "tools": []})
        assert answer.status_code == (400 if template is None else 200)


def test_mistrals_ids_and_templates_that_want_text():
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments + '!' if m.tool_calls }}{% endfor %}x"
    dialect = Dialect(calls=MISTRAL, takes_tools=True, text_arguments=True)
    with serving(template=ChatTemplate(source), dialect=dialect) as server:
        say(server, '[TOOL_CALLS]time[ARGS]{"a": 1}')
        (call,) = ask(server).choices[0].message.tool_calls
        assert len(call.id) == 9
        assert call.id.isalnum()
        message = {"role": "assistant", "tool_calls": [call.model_dump()]}
        ask(server, messages=[*USER, message])
        assert bytes(server.replica.requests[-1].prompt.token_ids) == b'{"a": 1}!x'
