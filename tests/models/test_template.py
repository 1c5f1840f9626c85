"""Chat templates: rendered as transformers renders them, sandboxed, bounded, errors explained."""

from datetime import UTC, datetime

import pytest
from checkpoints import byte_level_vocabulary
from test_tokenizer import gguf_with

from tokenpath.models import hf_folder
from tokenpath.models.gguf_file import read_gguf
from tokenpath.models.template import ChatTemplate, read_chat_template
from tokenpath.protocol.errors import InvalidRequestError, ModelFileError, SpecError

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {% generation %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' ~ call.function | tojson(indent=2) ~ '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and not thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
{{- eos_token }}
"""
"""The devices of published templates: whitespace control, loop controls, namespaces, tools."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "<é> & 'quotes'",
            "parameters": {"b": 1, "a": []},
        },
    }
]
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be <brief>"}, {"role": "user", "content": "  héllo & 你好 \n"}],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": '{"degrees": 3}'},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "<|im_end|>"},
    ],
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("template")
    gguf_with(folder, "qwen2", byte_level_vocabulary(["<|endoftext|>", "<|im_end|>"]))
    return AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("extra", [{}, {"add_generation_prompt": False}, {"thinking": False}])
def test_renders_as_transformers_does(reference, messages, tools, extra):
    wanted = reference.apply_chat_template(
        messages,
        chat_template=CHATML,
        tools=tools,
        tokenize=False,
        **{"add_generation_prompt": True, **extra},
    )
    template = ChatTemplate(CHATML, reference.bos_token, reference.eos_token)
    assert template.render(messages, tools=tools, **extra) == wanted
    assert wanted.endswith("<|im_end|>")


def test_the_refusal_is_the_templates_own():
    with pytest.raises(InvalidRequestError, match="Unknown role: wizard") as caught:
        ChatTemplate(CHATML).render([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ strftime_now.__globals__.os }}",
        "{{ raise_exception.__code__.co_code + 1 }}",
        "{% include 'other' %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_mistakes_and_mischief_end_the_request_only(source):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="chat template cannot render"):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_output_is_bounded():
    endless = "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="exceed 5,000 characters"):
        ChatTemplate(endless, max_characters=5_000).render([{"role": "user", "content": ""}])


def test_the_clock_is_given():
    template = ChatTemplate(
        "{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2026, 3, 4, tzinfo=UTC)
    )
    assert template.render([]) == "04 March 2026"


def test_invalid_jinja_names_the_line():
    with pytest.raises(ModelFileError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_from_a_path(tmp_path):
    path = tmp_path / "chat.jinja"
    with pytest.raises(SpecError, match=r"chat\.jinja"):
        read_chat_template(path)
    path.write_text("{{ bos_token }}{{ messages[0].content }}é", encoding="utf-8")
    assert read_chat_template(path, "<s>").render([{"content": "x"}]) == "<s>xé"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="cannot be read"):
        read_chat_template(path)


def test_from_a_folder(tmp_path):
    assert hf_folder.chat_template_source(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": "one"}')
    assert hf_folder.chat_template_source(tmp_path) == "one"
    settings.write_text(
        '{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}'
    )
    assert hf_folder.chat_template_source(tmp_path) == "y"
    settings.write_text('{"chat_template": 3}')
    with pytest.raises(ModelFileError, match="should be a string"):
        hf_folder.chat_template_source(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert hf_folder.chat_template_source(tmp_path) == "own file"


def test_from_a_gguf(tmp_path):
    vocabulary = byte_level_vocabulary() | {"tokenizer.chat_template": CHATML}
    file = read_gguf(gguf_with(tmp_path, "qwen2", vocabulary))
    assert file.text("tokenizer.chat_template") == CHATML
