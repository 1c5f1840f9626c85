"""Splitting answers: any chunking gives the same, nothing is lost, arguments survive to the byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models.dialects import reader as reader_module
from tokenpath.models.dialects.families import (
    CALL_FORMATS,
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_THINK,
    THINK,
)
from tokenpath.models.dialects.json_steps import MAX_DEPTH, NotACall, recognise, value
from tokenpath.models.dialects.reader import AnswerReader, Text, Thought, check_marks
from tokenpath.models.dialects.shapes import Call, Shape

TOOLS = ("weather", "time", "a-b_9")
NAMED = Shape(open="<function=", payload="named", between=">", close="</function>")
BLOCK = Shape(
    open="<calls><call>",
    payload="named",
    between="<sep>",
    join="</call><call>",
    close="</call></calls>",
)
FORMS = {form.name: form.shapes for form in CALL_FORMATS.values()} | {
    "named": (NAMED,),
    "block": (BLOCK,),
}


def read(pieces, shapes, **options):
    reader = AnswerReader(shapes=shapes, tools=TOOLS, **options)
    events = [event for piece in pieces for event in reader.push(piece)]
    events += reader.finish()
    return events


def summary(events):
    """Events with neighbours of one kind joined: what a client has in the end."""
    joined = []
    for event in events:
        if joined and type(joined[-1]) is type(event) and not isinstance(event, Call):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def cut(text, places):
    places = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def texts(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def thoughts(events):
    return "".join(event.text for event in events if isinstance(event, Thought))


def made(events):
    return [event for event in events if isinstance(event, Call)]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<think>", "</think>", "</thi", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "[TOOL", "<|python_tag|>", "<|py", "```tool_code", "```json", "```", "{", "}",
    "[", "]", ",", ":", ";", "; ", '"', "\\", "\\u00e9", " ", "\n", "\n\n", "é", "𝄞", "x", "weather", "time",
    '"name"', '"weather"', '"arguments"', '"parameters"', "1", "-0.5e3", "true", "null",
    '{"name": "weather", "arguments": {}}', '{"name": "weather", "arguments": {"a": [1, {}]}}',
    '{"name": "time", "parameters": {"s": "<tool_call>\\"}"}}', '{"name": "nobody", "arguments": {}}',
    'weather{"a": 1}', "time[ARGS]{}", 'weather(city="Paris")', "<function=", "weather>", "</function>",
    "<calls><call>", "<sep>{}", "</call><call>", "</call></calls>", " " * 1_500,
]  # fmt: skip
noise = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(
    text=noise,
    places=st.lists(st.integers(0, 10_000), max_size=12),
    form=st.sampled_from(sorted(FORMS)),
    marks=st.sampled_from([None, THINK, MISTRAL_THINK]),
    thinking=st.booleans(),
    parallel=st.booleans(),
)
def test_any_chunking_reads_as_the_whole(text, places, form, marks, thinking, parallel):
    options = {"thoughts": marks, "thinking": thinking, "parallel": parallel}
    whole = summary(read([text], FORMS[form], **options))
    assert summary(read(cut(text, places), FORMS[form], **options)) == whole
    assert summary(read(list(text), FORMS[form], **options)) == whole


@given(text=noise, form=st.sampled_from(sorted(FORMS)))
def test_what_holds_no_call_comes_out_as_it_went_in(text, form):
    events = read(list(text), FORMS[form])
    if not made(events):
        assert texts(events) == text


@given(text=noise, form=st.sampled_from(sorted(FORMS)))
def test_without_tools_everything_is_text(text, form):
    reader = AnswerReader(shapes=FORMS[form])
    assert texts(reader.push(text) + reader.finish()) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(["<tool_call>", "</tool_call>", '{"}', "[TOOL_CALLS]", "```", '\\"', "; {"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
arguments = st.builds(
    lambda members, ascii_only, indent: json.dumps(members, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(), json_values, max_size=4),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
).filter(lambda text: all(not 0xD800 <= ord(character) < 0xE000 for character in text))
call_lists = st.lists(st.builds(Call, st.sampled_from(TOOLS), arguments), min_size=1, max_size=3)
says = st.sampled_from(["", "Let me look.", 'Überall: { "a": 1 } <b> [x] `y` \\', "a < b; c > d"])


def hermes(calls, key="arguments"):
    return "\n".join(
        f'<tool_call>\n{{"name": "{call.name}", "{key}": {call.arguments}}}\n</tool_call>'
        for call in calls
    )


def llama(calls):
    return "; ".join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls)


def mistral_list(calls):
    items = (f'{{"name": "{c.name}", "arguments": {c.arguments}, "id": "abc"}}' for c in calls)
    return "[TOOL_CALLS] [" + ", ".join(items) + "]"


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in calls)


def mistral_ids(calls):
    return "".join(f"[TOOL_CALLS]{c.name}[CALL_ID]a1B2c3D4e[ARGS]{c.arguments}" for c in calls)


def mistral_bare(calls):
    return "".join(f"[TOOL_CALLS]{c.name}{c.arguments}" for c in calls)


def gemma_fences(calls):
    items = (f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls)
    return "\n".join(
        f"```{kind}\n{item}\n```"
        for kind, item in zip(["tool_code", "json", "tool_call"], items, strict=False)
    )


def gemma_list(calls):
    return (
        "[" + ", ".join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls) + "]"
    )


def named(calls):
    return "\n".join(f"<function={c.name}>{c.arguments}</function>" for c in calls)


def block(calls):
    inner = "</call><call>".join(f"{c.name}<sep>{c.arguments}" for c in calls)
    return f"<calls><call>{inner}</call></calls>"


WRITERS = [
    (HERMES.shapes, hermes, True),
    (LLAMA3.shapes, llama, False),
    (LLAMA3.shapes, lambda calls: "<|python_tag|>" + llama(calls), False),
    (MISTRAL.shapes, mistral_list, True),
    (MISTRAL.shapes, mistral_named, True),
    (MISTRAL.shapes, mistral_ids, True),
    (MISTRAL.shapes, mistral_bare, True),
    (GEMMA.shapes, gemma_fences, True),
    (GEMMA.shapes, gemma_list, False),
    ((NAMED,), named, True),
    ((BLOCK,), block, True),
]


@given(
    writer=st.sampled_from(WRITERS),
    calls=call_lists,
    before=says,
    after=says,
    places=st.lists(st.integers(0, 10_000), max_size=10),
)
def test_calls_survive_to_the_byte(writer, calls, before, after, places):
    shapes, write, marked = writer
    if not marked:
        before = after = ""
    text = before + ("\n" if before else "") + write(calls) + after
    events = read(cut(text, places), shapes)
    assert made(events) == calls
    said = texts(events)
    assert said.startswith(before)
    assert said.endswith(after)
    assert said.removeprefix(before).removesuffix(after).strip() == ""
    assert before or after or not said
    assert all(json.loads(call.arguments) is not None for call in made(events))
    assert made(read(cut(text, places), shapes, parallel=False)) == calls[:1]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1,}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": 01}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": NaN}}\n</tool_call>',
        "<tool_call>\n{'name': 'weather', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "none"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"function": 3}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}} and so on </tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}}',
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_cal',
        '<tool_call>{"name": "weather", "arguments": {"a": "',
        '<tool_call>{"name": "weather", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": "\\x"}}</tool_call>',
        "The mark <tool_call> begins a call.",
        "ends with <tool_",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "weather", "arguments": ' + "[" * 200 + "]" * 200 + "}</tool_call>",
    ],
)
def test_what_only_looks_like_a_call_is_text(text):
    for pieces in ([text], list(text), [text[:20], text[20:]]):
        assert summary(read(pieces, HERMES.shapes)) == [Text(text)]


def test_a_call_after_a_broken_one_is_found():
    good = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for broken in (
        "<tool_call>{oh",
        "<tool_call>",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    ):
        events = summary(read(list(broken + good), HERMES.shapes))
        assert events == [Text(broken), Call("weather", "{}")]


def test_two_calls_in_one_delta_are_both_kept():
    text = hermes([Call("weather", '{"a": 1}'), Call("time", "{}")])
    assert read([text], HERMES.shapes) == [Call("weather", '{"a": 1}'), Call("time", "{}")]


def test_forms_of_an_object():
    for text, wanted in [
        ('{"arguments": {"b":2}, "name": "weather"}', '{"b":2}'),
        ('{"name": "weather", "parameters": {}}', "{}"),
        ('{"name": "weather"}', "{}"),
        ('{"name": "wea\\u0074her", "arguments": {"a": "\\u00e9é"}}', '{"a": "\\u00e9é"}'),
        ('{"name": "weather", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        (
            '{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"z": 0}}}',
            '{"z": 0}',
        ),
        ('[{"name": "weather", "arguments": {}}]', "{}"),
    ]:
        events = read(list(f"<tool_call>{text}</tool_call>"), HERMES.shapes)
        assert events == [Call("weather", wanted)]


def test_text_goes_out_as_soon_as_it_is_no_call():
    reader = AnswerReader(shapes=HERMES.shapes, tools=TOOLS)
    assert reader.push("Hi ") == [Text("Hi")]
    assert reader.push("there <") == [Text(" there")]
    assert reader.push("b") == [Text(" <b")]
    assert reader.push("<tool_call>{") == []
    assert reader.push('"a"') == []
    assert reader.push("x") == [Text('<tool_call>{"a"x')]
    assert reader.push("<tool_call>{" + '"name": "weather", "arguments": {}') == []
    assert reader.push("}</tool_call") == []
    assert reader.push(">\n") == [Call("weather", "{}")]
    assert reader.finish() == []


def test_other_members_tell_at_once_that_bare_json_is_text():
    for shapes in (LLAMA3.shapes, GEMMA.shapes):
        reader = AnswerReader(shapes=shapes, tools=TOOLS)
        assert reader.push('{"title"') == [Text('{"title"')]
    reader = AnswerReader(shapes=LLAMA3.shapes, tools=TOOLS)
    assert reader.push('{"name": "Bob"') == [Text('{"name": "Bob"')]


def test_bare_json_is_a_call_only_at_the_beginning():
    call = '{"name": "weather", "parameters": {}}'
    assert made(read([call], LLAMA3.shapes))
    assert made(read(["\n " + call + "\n"], LLAMA3.shapes))
    assert read(["So: " + call], LLAMA3.shapes) == [Text("So: " + call)]
    assert summary(read(list(call + "; done"), LLAMA3.shapes)) == [
        Call("weather", "{}"),
        Text("; done"),
    ]
    assert texts(read([call + ";"], LLAMA3.shapes)) == ";"


def test_qwens_coder_writes_no_marks():
    call = '{"name": "weather", "arguments": {"a": 1}}'
    for text in (call, f"```json\n{call}\n```", f"So:\n```json\n{call}\n```\n"):
        assert made(read(list(text), HERMES.shapes)) == [Call("weather", '{"a": 1}')]
    for text in (
        "{" + call + "}",
        '{"name": "weather"}',
        '```json\n{"a": 1}\n```',
        f"So: {call}",
        f"```json\n{call} // x\n```",
    ):
        assert summary(read(list(text), HERMES.shapes)) == [Text(text)]


def test_gemmas_python():
    text = "```tool_code\nprint(weather(city=\"Pa)ris ```\", days=[1, 2], deep={'a': None}))\n```"
    (call,) = read(list(text), GEMMA.shapes)
    assert json.loads(call.arguments) == {"city": "Pa)ris ```", "days": [1, 2], "deep": {"a": None}}
    assert made(read(["```tool_code\ntime()\n```"], GEMMA.shapes)) == [Call("time", "{}")]
    for code in ("weather(1)", "weather(**x)", "weather(a=b)", "nobody()", "weather(a=1e999)",
                 "weather(a=b'x')", "weather(a={1, 2})", "x = 1", "weather(a='\\ud800')", "weather(a=", ")", "import os"):  # fmt: skip
        text = f"```tool_code\n{code}\n```"
        assert summary(read(list(text), GEMMA.shapes)) == [Text(text)]


def test_held_text_is_bounded(monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_HELD", 50)
    text = '<tool_call>{"name": "weather", "arguments": {"a": "' + "x" * 100
    reader = AnswerReader(shapes=HERMES.shapes, tools=TOOLS)
    given_out = "".join(texts(reader.push(character)) for character in text)
    assert len(given_out) >= len(text) - 50
    assert given_out + texts(reader.finish()) == text
    reader = AnswerReader(shapes=HERMES.shapes, tools=TOOLS)
    assert len(texts(reader.push(" " * 10_000))) > 8_900


def test_thoughts():
    def split(text, **options):
        events = read(list(text), HERMES.shapes, thoughts=THINK, **options)
        assert summary(events) == summary(read([text], HERMES.shapes, thoughts=THINK, **options))
        return thoughts(events), texts(events), made(events)

    assert split("<think>\nHm.\n</think>\n\nYes.\n") == ("Hm.", "Yes.\n", [])
    assert split("Hm.\n</think>\n\nYes.", thinking=True) == ("Hm.", "Yes.", [])
    assert split("\n<think></think>Yes.") == ("", "Yes.", [])
    assert split("<think>\n a  b") == ("a  b", "", [])
    assert split("Hm", thinking=True) == ("Hm", "", [])
    assert split("So <think>no</think>") == ("", "So <think>no</think>", [])
    assert split("<thin") == ("", "<thin", [])
    assert split(" <thx>") == ("", " <thx>", [])
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert split(f"<think>\nmaybe {call}\n</think>\n\n{call}") == (
        f"maybe {call}",
        "",
        [Call("time", "{}")],
    )
    assert split("a </thi b</think>c", thinking=True) == ("a </thi b", "c", [])


def test_whether_there_was_a_thought_is_known():
    reader = AnswerReader(thoughts=THINK)
    reader.push("<think></think>x")
    assert reader.thought
    reader = AnswerReader(thoughts=THINK)
    reader.push("x")
    assert not reader.thought
    assert AnswerReader(thoughts=THINK, thinking=True).thought


def test_marks_must_not_contain_each_other():
    with pytest.raises(ValueError, match="contains"):
        check_marks(["<a>", "x<a>"])
    for form in CALL_FORMATS.values():
        check_marks([shape.open for shape in form.shapes if shape.open])


tokens = st.sampled_from(["{", "}", "[", "]", ",", ":", '"a"', '"\\u12aF"', '"', "\\", "1", "-", "0", ".", "e",
                          "E+2", "true", "false", "null", "nul", " ", "\n", "\x01", "é", "-1.5"])  # fmt: skip


@given(st.lists(tokens, max_size=12).map("".join), st.booleans())
def test_json_is_recognised_as_json_loads_does(text, wrapped):
    """What is taken is JSON; what is JSON is taken."""
    text = f'{{"a": {text}}}' if wrapped else "{" + text
    tape = ["{"]
    try:
        found = recognise(value(tape, "{"), tape, text[1:])
    except NotACall:
        found = None
    try:
        json.loads(text, parse_constant=int)
        valid = True
    except ValueError:
        valid = False
    taken = text[: found[1] + 1] if found is not None else None
    if taken is not None:
        json.loads(taken)
    assert valid == (taken is not None and text[len(taken) :].strip(" \n") == "")


@given(json_values)
def test_every_json_value_is_taken(member):
    text = json.dumps({"a": member})
    tape = ["{"]
    assert recognise(value(tape, "{"), tape, text[1:])[1] == len(text) - 1


def test_depth_is_bounded():
    for depth, fine in [(MAX_DEPTH - 1, True), (MAX_DEPTH + 2, False)]:
        text = '{"a": ' + "[" * depth + "]" * depth + "}"
        tape = ["{"]
        try:
            recognise(value(tape, "{"), tape, text[1:])
            assert fine
        except NotACall:
            assert not fine
