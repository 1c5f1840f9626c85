"""Calls as grammars: what they accept is read back as calls that fit; everything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from call_cases import FORMS, TAGS, TOOLS, checked_calls, constraint_of, read
from grammar_cases import ENDS, ByteTokens, byte_vocabulary
from test_grammar_state import allowed, walk

from tokenpath.engine.grammar.compile import compile_grammar
from tokenpath.engine.grammar.compiler import GrammarCompiler
from tokenpath.engine.grammar.state import CompiledGrammar
from tokenpath.models.dialects.constraint import OfferedTool, call_constraint
from tokenpath.models.dialects.families import HERMES, LLAMA3, MISTRAL
from tokenpath.models.dialects.reader import Text, Thought
from tokenpath.models.dialects.shapes import Call
from tokenpath.protocol.calls import CallConstraint, ThoughtFrame
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.grammar import Grammar

BERN = '{"name": "weather", "arguments": {"city": "Bern", "near": null}}'
BARE = BERN.replace("arguments", "parameters")
TIME = '{"name": "time", "arguments": {}}'
MARKED = f"<tool_call>\n{BERN}\n</tool_call>"


def compiled(constraint: CallConstraint) -> CompiledGrammar:
    return compile_grammar(Grammar.calls(constraint), byte_vocabulary())


def accepts(constraint: CallConstraint, *pieces: str | int) -> bool:
    """Whether texts, spelled in bytes, and control tokens are a whole answer."""
    state = compiled(constraint).begin(ENDS)
    tokens = [
        token
        for piece in pieces
        for token in ([piece] if isinstance(piece, int) else piece.encode())
    ]
    return state.accepts(tokens) == len(tokens) and state.complete


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("thoughts", "begun"),
    [
        (None, ""),
        (False, ""),
        (False, "\n<think>Hä <tool_call> {</think>"),
        (True, "Hä <tool_call> {</think>\n"),
    ],
)
def test_required_calls_that_end_are_read_as_calls_that_fit(name, thoughts, begun):
    form = FORMS[name]
    constraint = constraint_of(form, required=True, thoughts=thoughts)
    grammar = compiled(constraint)
    counts = []
    for seed in range(40):
        state = grammar.begin(ENDS)
        # A random walk would never find the end of a thought, nor the way past one.
        text = (begun or form.shapes[0].open or "{").encode()
        assert state.accepts(text) == len(text)
        data, ended = walk(state, seed, steps=900)
        if ended:
            events = read(form, (text + data).decode(), constraint)
            names = checked_calls(events)
            assert names
            assert not [event for event in events if isinstance(event, Text)]
            counts.append(len(names))
    assert len(counts) >= 5, "hardly any walk came to an end"
    assert max(counts) > 1, "no walk made several calls"


@pytest.mark.parametrize("name", FORMS)
def test_one_call_of_one_tool(name):
    form = FORMS[name]
    constraint = constraint_of(form, named="weather_in")
    grammar = compiled(constraint)
    for seed in range(10):
        data, ended = walk(grammar.begin(ENDS), seed)
        assert ended
        assert checked_calls(read(form, data.decode(), constraint)) == ["weather_in"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("thoughts", [None, False, True])
def test_free_text_and_strict_calls(name, thoughts):
    """Walks that begin in the middle of an answer: whatever is read as a call there fits."""
    form = FORMS[name]
    constraint = constraint_of(form, thoughts=thoughts)
    grammar = compiled(constraint)
    mark = form.shapes[0].open.encode()
    thought = b"Hm {</think>" if thoughts else b""
    called = 0
    for begin in (b"", b" Let me see. ", b"\n", b"<", b"\x1c "):
        for seed in range(12):
            state = grammar.begin(ENDS)
            text = thought + begin + mark
            assert state.accepts(text) == len(text)
            data, ended = walk(state, seed)
            if ended:
                events = read(form, (text + data).decode(), constraint)
                names = checked_calls(events)
                called += len(names)
                assert bool(names) or not mark
    assert called >= (5 if mark else 0)


@pytest.mark.parametrize("name", FORMS)
def test_what_free_text_cannot_be(name):
    """Answers whose calls do not fit, in every spelling that would be read as a call."""
    form = FORMS[name]
    constraint = constraint_of(form, thoughts=False)
    assert accepts(constraint, "Just text. {}")
    assert accepts(constraint, "")
    wrong = '{"name": "weather", "%s": {"city": 3, "near": null}}'
    tagged = '<function=weather>{"city": 3}</function>'
    for key in ("arguments", "parameters"):
        for lead in ("", " \n", "\n" * 99, "\x1c", "\xa0", "Text ", "<think>x</think>\n", "; "):
            inner = wrong % key
            for text in (inner, f"[{inner}]", f"<tool_call>{inner}</tool_call>",
                         f"<tool_call>\n{inner}\n</tool_call>", f"[TOOL_CALLS][{inner}]",
                         f"```json\n{inner}\n```", f"<|python_tag|>{inner}", tagged):  # fmt: skip
                if accepts(constraint, lead + text):
                    events = read(form, lead + text, constraint)
                    assert not [event for event in events if isinstance(event, Call)], text


def test_hermes():
    free = constraint_of(HERMES)
    assert accepts(free, "Let me see.", MARKED)
    assert accepts(free, MARKED, f"\n<tool_call>\n{TIME}\n</tool_call>")
    assert accepts(free, BERN)
    assert accepts(free, "\n", BERN)
    assert not accepts(free, "See <tool_call>: a mark")
    assert not accepts(free, MARKED, " and text after it")
    required = constraint_of(HERMES, required=True)
    assert accepts(required, MARKED)
    for text in ("", "Text", BERN, f"Text {MARKED}", MARKED + "\n", MARKED.replace("city", "town")):
        assert not accepts(required, text)
    assert not accepts(constraint_of(HERMES, required=True, parallel=False), MARKED, "\n", MARKED)
    assert accepts(constraint_of(HERMES, required=True), MARKED, "\n", MARKED)


def test_calls_without_marks():
    required = constraint_of(LLAMA3, required=True)
    assert accepts(required, BARE)
    assert accepts(required, f"{BARE}; {BARE}")
    assert not accepts(required, f"{BARE} {BARE}")
    free = constraint_of(LLAMA3)
    assert accepts(free, "Text, then ", BARE)  # which is text: a call would be the whole answer
    assert not accepts(free, '{"a": 1}')
    assert not accepts(free, f"[{BARE}]")


def test_thoughts_come_before_a_required_call():
    may = constraint_of(HERMES, required=True, thoughts=False)
    must = constraint_of(HERMES, required=True, thoughts=True)
    thought = "<think>Is <tool_call> {right}?</think>\n\n"
    assert accepts(may, MARKED)
    assert accepts(may, thought, MARKED)
    assert not accepts(may, thought)
    assert not accepts(may, thought, "Text")
    assert not accepts(must, MARKED)
    assert accepts(must, thought.removeprefix("<think>"), MARKED)
    text = thought + MARKED
    assert read(HERMES, text, may) == [
        Thought("Is <tool_call> {right}?"),
        Call("weather", '{"city": "Bern", "near": null}'),
    ]
    assert not accepts(constraint_of(HERMES, required=True), text)


CONTROL = ByteTokens.control
LISTED = constraint_of(MISTRAL, controls={"[TOOL_CALLS]": CONTROL}, required=True)


def test_marks_that_are_control_tokens_are_named_as_tokens():
    assert accepts(LISTED, CONTROL, f"[{BERN}, {TIME}]")
    assert not accepts(LISTED, f"[TOOL_CALLS][{BERN}]")
    controls = {"[TOOL_CALLS]": CONTROL, "[ARGS]": CONTROL}
    named = constraint_of(MISTRAL, controls=controls, required=True)
    assert allowed(compiled(named).begin(ENDS)) == {CONTROL}
    assert accepts(named, CONTROL, "time", CONTROL, "{}", CONTROL, "time", CONTROL, "{}")
    free = constraint_of(MISTRAL, controls=controls)
    assert accepts(free, "Text [")
    assert accepts(free, CONTROL, "time", CONTROL, "{}")
    assert accepts(free, "Text ", CONTROL, "time", CONTROL, "{}")
    assert not accepts(free, "Text ", CONTROL)
    # Spelled in other tokens it would be read as the mark all the same.
    assert not accepts(free, "Text [TOOL_CALLS]")


def test_marks_on_lines_of_their_own_that_are_control_tokens():
    controls = {"<tool_call>": CONTROL, "</tool_call>": CONTROL}
    call = (CONTROL, f"\n{BERN}\n", CONTROL)
    for required in (True, False):
        constraint = constraint_of(HERMES, controls=controls, required=required)
        assert accepts(constraint, *call)
        assert accepts(constraint, *call, "\n", *call)
        assert not accepts(constraint, *call[:-1])
        assert accepts(constraint, "Text ", *call) is not required
        assert not accepts(constraint, "Text <tool_call>")


def test_thoughts_between_control_tokens():
    made = call_constraint(MISTRAL, TOOLS, controls={"[THINK]": CONTROL, "[/THINK]": CONTROL},
                           required=True)  # fmt: skip
    marks = ThoughtFrame("[THINK]", "[/THINK]")
    call = f"[TOOL_CALLS][{BERN}]"
    may = msgspec.structs.replace(made, thoughts=marks)
    assert accepts(may, call)
    assert accepts(may, CONTROL, "Hm", CONTROL, call)
    assert not accepts(may, CONTROL, f"Hm{call}")
    assert not accepts(may, CONTROL, "Hm [/THINK]", CONTROL, call)
    must = msgspec.structs.replace(made, thoughts=msgspec.structs.replace(marks, begun=True))
    assert accepts(must, "Hm", CONTROL, "\n", call)
    assert not accepts(must, call)


BAD = {
    "unsupported": ({"not": {"required": ["a"]}}, UnsupportedError, "'not' at # is not supported"),
    "wrong": ({"properties": {"a": {"type": "text"}}}, InvalidRequestError, "at #/properties/a"),
    "refused by the library": (
        {"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
        InvalidRequestError,
        "look-around",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_field(name):
    schema, kind, says = BAD[name]
    place = "tools[1].function.parameters"
    tools = [TOOLS[0], OfferedTool("bad", schema, strict=True, field=place)]
    grammar = Grammar.calls(call_constraint(TAGS, tools, controls={}))
    compiler = GrammarCompiler(byte_vocabulary, limit_s=20, cache_entries=2)
    for _ in range(2):
        with pytest.raises(kind, match=says) as caught:
            compiler.compile(grammar)
        assert caught.value.param == place
        assert place in caught.value.message


@pytest.mark.parametrize("name", BAD)
def test_without_strict_any_object_stands_in_its_place(name):
    constraint = call_constraint(
        HERMES, [OfferedTool("bad", BAD[name][0])], controls={}, required=True
    )
    call = '<tool_call>\n{"name": "bad", "arguments": %s}\n</tool_call>'
    assert accepts(constraint, call % '{"any": ["thing"]}')
    assert not accepts(constraint, call % '"text"')
