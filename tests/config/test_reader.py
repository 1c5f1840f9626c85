"""What an operator is told about a wrong spec: where, what, and what would be right."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.config.positions import MAX_VALUES
from tokenpath.config.reader import MAX_SPEC_BYTES, default_spec, load_spec, parse_spec
from tokenpath.config.spec import EngineSettings, Spec
from tokenpath.protocol.errors import SpecError

OK = "models: [{source: x}]"


def errors(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, name="s.yaml")
    return caught.value.message.splitlines()


def test_a_whole_spec():
    spec = parse_spec(
        """
        version: 1
        gateway:
          port: 9000
          limits: {request_s: 30}
        models:
          - name: small
            source: [a, b]
            engine: {threads: 2, dtype: float32}
          - source: 2024-01-01   # not a date
        logging: {format: json}
        """,
        name="s.yaml",
    )
    assert spec.gateway.port == 9000
    assert spec.gateway.limits.request_s == 30.0
    assert spec.models[0].source == ["a", "b"]
    assert spec.models[0].engine.threads == 2
    assert spec.models[1].source == "2024-01-01"
    assert spec.logging.format == "json"


def test_the_shipped_spec_is_valid_and_says_nothing_but_its_models():
    spec = default_spec()
    assert spec == Spec(models=spec.models)
    assert spec.models[0].source == ["qwen2.5-coder-1.5b", "gemma-3-270m"]


def test_all_errors_at_once_in_order_of_lines():
    found = errors(
        """version: 2
gateway:
  prot: 80
  port: "8000"
  auth: key
  host: no
  queued_tokens: 5
  limits: {request_s: .inf, body_bytes: 1.5, stop_strings: yes, body_bytes: 3}
models:
  - source: []
  - source: 3
    engine: {threads: 0, zzz: 1}
  - source: ""
  - {}
  - source: [1, x]
logging:
mystery: 1
"""
    )
    assert found == [
        "s.yaml:1:10: version: must be 1, not 2",
        "s.yaml:3:3: gateway.prot: unknown key; did you mean port?",
        "s.yaml:4:9: gateway.port: must be a whole number, not the text '8000'; leave out the quotes",
        "s.yaml:5:9: gateway.auth: must be 'keys' or 'none', not the text 'key'",
        "s.yaml:6:9: gateway.host: must be text, not no (YAML reads it as false); quote it if text is meant",
        "s.yaml:7:3: gateway.queued_tokens: unknown key; it belongs under gateway.limits",
        "s.yaml:8:23: gateway.limits.request_s: must be a finite number",
        "s.yaml:8:60: gateway.limits.stop_strings: must be a whole number, not yes (YAML reads it as true)",
        "s.yaml:8:65: gateway.limits.body_bytes: the key is already given on line 8",
        "s.yaml:10:13: models[0].source: must have at least one entry",
        "s.yaml:11:13: models[1].source: must be text or a list, not 3; quote it if text is meant",
        "s.yaml:12:23: models[1].engine.threads: must be greater than 0, not 0",
        f"s.yaml:12:26: models[1].engine.zzz: unknown key; known here: {', '.join(EngineSettings.model_fields)}",
        "s.yaml:13:13: models[2].source: must not be empty",
        "s.yaml:14:5: models[3].source: this key is required",
        "s.yaml:15:14: models[4].source[0]: must be text, not 1; quote it if text is meant",
        "s.yaml:16:9: logging: must be a group of keys, not empty",
        "s.yaml:17:1: mystery: unknown key; known here: version, gateway, models, logging",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "s.yaml is empty; the smallest spec is one line: 'models: [{source: gemma-3-270m}]'"),
        ("# only a comment\n", "s.yaml is empty"),
        ("a: b: c", "s.yaml:1:5: a second ': ' on one line"),
        ("models:\n\t- source: x", "s.yaml:2:1: a tab stands where YAML allows only spaces"),
        ("models: [", "s.yaml:1:10: not valid YAML"),
        ("models: *x", "s.yaml:1:9: undefined alias 'x'"),
        ("models: &a [*a]", "s.yaml:1:9: models[0]: the alias refers to a value that contains it"),
        ("a: &a {<<: *a}", "s.yaml:1:4: a: <<: must be followed by an alias of another mapping"),
        ("models: !!python/object:os.system [1]", "s.yaml:1:9: models: the tag tag:yaml.org,2002:python"),
        ("- a", "s.yaml:1:1: must be a group of keys, not a list"),
        ("hello", "s.yaml:1:1: must be a group of keys, not the text 'hello'"),
        (OK + "\n---\na: 1", "s.yaml:2:1: a second document begins here"),
        ("models: \x07", "s.yaml:1:9: the character U+0007 is not allowed in YAML"),
        ("[" * 5000, "s.yaml:1:1: lists or groups are nested too deeply"),
        ("models: [{source: a, name: !!int x}]", "s.yaml:1:28: models[0].name: the value cannot be read"),
        (f"? [1]\n: 2\n{OK}", "s.yaml:1:3: a key must be a plain word"),
        (
            "models: [{source: a, name: m}, {source: b, name: m}]",
            "s.yaml:1:50: models[1].name: models[0] has the name 'm' already; names must differ",
        ),
        (
            'models: [{source: a, name: ""}]',
            "s.yaml:1:28: models[0].name: must be printable characters",
        ),
        (
            'models: [{source: a, name: "a\\nb"}]',
            "s.yaml:1:28: models[0].name: must be printable characters",
        ),
        (
            f"models: [{{source: a, engine: {{threads: {10**22}}}}}]",
            "s.yaml:1:40: models[0].engine.threads: must be at most 4096",
        ),
        ("gateway: {port: 70000}\n" + OK, "s.yaml:1:17: gateway.port: must be at most 65535, not 70000"),
        ("gateway: {limits: {request_s: .nan}}\n" + OK, "s.yaml:1:31: gateway.limits.request_s: must be a finite"),
    ],
)  # fmt: skip
def test_one_error(text, expected):
    found = errors(text)
    assert any(line.startswith(expected) for line in found), found


def test_aliases_cannot_expand_without_bound():
    text = "a: &a [" + "1," * 9 + "]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        text += f"{name}: &{name} [" + f"*{before}," * 9 + "]\n"
    assert errors(text) == [
        f"s.yaml:1:1: more than {MAX_VALUES} values once the aliases (*name) are expanded"
    ]
    chain = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 900))
    assert len(errors(chain)) == 1


def test_merge_keys():
    spec = parse_spec(
        "models: [{source: x, engine: &e {threads: 1, max_running: 2}},"
        " {source: y, engine: {<<: *e, max_running: 3}}]",
        name="s.yaml",
    )
    assert spec.models[1].engine.threads == 1
    assert spec.models[1].engine.max_running == 3


def test_files_that_are_no_spec(tmp_path):
    def message(name: str, raw: bytes | None) -> str:
        path = tmp_path / name
        if raw is not None:
            path.write_bytes(raw)
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        return caught.value.message

    assert message("none.yaml", None) == f"there is no spec file {tmp_path / 'none.yaml'}"
    assert "is a binary file" in message("b", b"GGUF\0\0")
    assert ":2:4: byte 0xff is not UTF-8" in message("l", b"a: 1\nb: \xff\n")
    assert "is larger than" in message("big", b"#" * (MAX_SPEC_BYTES + 1))
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)
    (tmp_path / "dir.yaml").mkdir()
    with pytest.raises(SpecError, match="cannot be read: Not a directory"):
        load_spec(tmp_path / "b" / "x.yaml")


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + OK.encode())
    assert load_spec(tmp_path / "bom.yaml").models[0].source == "x"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["version", "gateway", "models", "limits", "port", "source", "engine"]
                )
                | st.text(),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_data_is_a_spec_or_a_spec_error(data):
    text = yaml.safe_dump(data, allow_unicode=True)
    try:
        spec = parse_spec(text, name="s.yaml")
    except SpecError as error:
        assert error.message.startswith("s.yaml")
    else:
        assert isinstance(spec, Spec)


@given(st.text(max_size=60))
def test_any_short_text_is_an_explained_error(text):
    with pytest.raises(SpecError):
        parse_spec(text, name="s.yaml")


@given(st.integers(1, 65535), st.booleans(), st.sampled_from(["auto", "float32", "bfloat16"]))
def test_what_spec_show_prints_reads_back(port, prefix_cache, dtype):
    spec = Spec.model_validate(
        {
            "gateway": {"port": port},
            "models": [{"source": "x", "engine": {"prefix_cache": prefix_cache, "dtype": dtype}}],
        }
    )
    assert parse_spec(yaml.safe_dump(spec.model_dump(mode="json")), name="s.yaml") == spec
