"""Tokenizers: the same ids as transformers, exact bytes of every token, whatever the source."""

import json

import numpy as np
import pytest
from checkpoints import (
    HIDDEN,
    byte_level_vocabulary,
    metadata_of,
    sentencepiece_vocabulary,
    tensors_of,
    write_gguf,
)
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models import gguf_tokenizer, hf_folder
from tokenpath.models.gguf_file import read_gguf
from tokenpath.models.local import open_model
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import InvalidRequestError, ModelFileError, ModelUnsupportedError

PIECES = [
    *[
        "the",
        "tokens",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "1",
        "42",
        "你好",
        "世",
        "🎉",
        "é",
    ],
    *[
        "'s",
        "'LL",
        "<",
        "|",
        ">",
        "▁",
        "<|im_start|>",
        "<|endoftext|>",
        "<s>",
        "<bos>",
        "<b>",
        "\x00",
    ],
    *["<0x0A>", "e\u0301", "\u00a0", "\u2028", "def main():", "_", "ü", "\U0010ffff"],
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
VOCABULARIES = {
    "qwen2": ("qwen2", byte_level_vocabulary()),
    "llama-bpe": ("llama", byte_level_vocabulary() | {"tokenizer.ggml.pre": "llama-bpe"}),
    "gpt-2": ("qwen2", byte_level_vocabulary() | {"tokenizer.ggml.pre": "gpt-2"}),
    "llama": ("llama", sentencepiece_vocabulary()),
    "gemma": ("gemma3", sentencepiece_vocabulary(gemma=True)),
}


def gguf_with(folder, architecture, vocabulary, **changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {"token_embd.weight": np.zeros((1, 32), np.float32)}
    return write_gguf(folder / "m.gguf", architecture, vocabulary | changes, tensors)


def tokenizer_of(path, cache):
    file = read_gguf(path)
    eos = file.integer("tokenizer.ggml.eos_token_id")
    bos = file.integer("tokenizer.ggml.bos_token_id")
    return Tokenizer(gguf_tokenizer.load(file, cache), bos_id=bos, eos_ids=(eos,))


@pytest.fixture(scope="module", params=VOCABULARIES)
def pair(request, tmp_path_factory):
    """Our tokenizer and transformers' of one GGUF."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    path = gguf_with(folder, *VOCABULARIES[request.param])
    reference = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return tokenizer_of(path, folder), reference


@given(text=TEXTS, add_special=st.booleans())
def test_ids_are_those_of_transformers(pair, text, add_special):
    mine, reference = pair
    ids = mine.encode(text, add_special=add_special)
    assert ids == reference.encode(text, add_special_tokens=add_special)


@given(text=TEXTS, skip_special=st.booleans())
def test_texts_are_those_of_transformers(pair, text, skip_special):
    mine, reference = pair
    ids = mine.encode(text)
    wanted = reference.decode(ids, skip_special_tokens=skip_special)
    assert mine.decode(ids, skip_special=skip_special) == wanted


@given(text=st.text(max_size=60))
def test_bytes_add_up_to_the_text(pair, text):
    """Whatever the text, its tokens' bytes are the text's, but for a SentencePiece first space."""
    mine, _ = pair
    ids = mine.encode(text, add_special=False)
    joined = b"".join(mine.token_bytes(i) for i in ids).decode()
    # A mark in the text means a space to SentencePiece, and special tokens may swallow nothing here.
    normal = text.replace("▁", " ") if mine._kind == "sentencepiece" else text
    assert joined in {normal, " " + normal}


def test_special_tokens_are_recognised_and_skipped(pair):
    mine, _ = pair
    for special in mine.special_ids:
        literal = mine.token_bytes(special).decode()
        assert mine.encode(literal, add_special=False)[-1] == special
        assert mine.decode([special]) == ""
        assert mine.decode([special], skip_special=False) == literal
        assert mine.token_id(literal) == special


def test_beginning_token_follows_the_model(tmp_path):
    vocabulary = sentencepiece_vocabulary()
    path = gguf_with(tmp_path, "llama", vocabulary)
    assert tokenizer_of(path, tmp_path).encode("the")[0] == 1
    assert tokenizer_of(path, tmp_path).encode("the", add_special=False)[0] != 1
    del vocabulary["tokenizer.ggml.add_bos_token"]
    path = gguf_with(tmp_path, "llama", vocabulary)
    assert tokenizer_of(path, tmp_path).encode("the")[0] == 1
    path = gguf_with(tmp_path, "llama", vocabulary, tokenizer__ggml__add_bos_token=False)
    assert tokenizer_of(path, tmp_path).encode("the")[0] != 1
    path = gguf_with(tmp_path, "llama", vocabulary, tokenizer__ggml__add_eos_token=True)
    assert tokenizer_of(path, tmp_path).encode("the")[-1] == 2


def test_token_bytes_of_every_kind(tmp_path):
    byte_level = tokenizer_of(gguf_with(tmp_path, *VOCABULARIES["qwen2"]), tmp_path)
    singles = {byte_level.token_bytes(i) for i in range(256)}
    assert singles == {bytes([i]) for i in range(256)}
    party = byte_level.encode("🎉")
    assert len(party) > 1
    assert b"".join(map(byte_level.token_bytes, party)) == "🎉".encode()
    assert byte_level.token_text(party[0]) == "\ufffd"
    pieces = tokenizer_of(gguf_with(tmp_path, *VOCABULARIES["gemma"]), tmp_path)
    assert pieces.token_bytes(pieces.token_id("<0xE4>")) == b"\xe4"
    assert pieces.token_bytes(pieces.token_id("▁")) == b" "
    assert pieces.token_bytes(pieces.token_id("▁▁▁")) == b"   "
    assert pieces.token_bytes(pieces.token_id("<b>")) == b"<b>"
    for tokenizer in (byte_level, pieces):
        for unknown in (-1, tokenizer.vocab_size, 1 << 31):
            assert tokenizer.token_bytes(unknown) == b""
            assert tokenizer.decode([unknown]) == ""


def test_first_space_of_llama_is_a_convention(tmp_path):
    tokenizer = tokenizer_of(gguf_with(tmp_path, *VOCABULARIES["llama"]), tmp_path)
    ids = tokenizer.encode("the dog", add_special=False)
    assert tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert tokenizer.decode(ids) == "the dog"


def test_smollm_cuts_numbers_into_digits(tmp_path):
    tokens = byte_level_vocabulary() | {"tokenizer.ggml.pre": "smollm"}
    tokenizer = tokenizer_of(gguf_with(tmp_path, "llama", tokens), tmp_path)
    ids = tokenizer.encode("1234567890")
    assert [tokenizer.token_text(i) for i in ids] == list("1234567890")


def test_lone_surrogates_do_not_crash(tmp_path):
    tokenizer = tokenizer_of(gguf_with(tmp_path, *VOCABULARIES["qwen2"]), tmp_path)
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("a\ud800b"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer__ggml__pre": "klingon"}, ModelUnsupportedError, "qwen2, smollm"),
        ({"tokenizer__ggml__model": "t5"}, ModelUnsupportedError, "gpt2, llama"),
        ({"tokenizer__ggml__token_type": [1, 1]}, ModelFileError, "2 entries"),
        (
            {"tokenizer__ggml__tokens": [1, 2], "tokenizer__ggml__token_type": [1, 1]},
            ModelFileError,
            "strings",
        ),
        ({"tokenizer__ggml__merges": ["a zz"]}, ModelFileError, "zz"),
        (
            {"tokenizer__ggml__bos_token_id": 9999, "tokenizer__ggml__add_bos_token": True},
            ModelFileError,
            "special token 9999",
        ),
    ],
)
def test_broken_metadata(tmp_path, changes, error, words):
    path = gguf_with(tmp_path, *VOCABULARIES["qwen2"], **changes)
    with pytest.raises(error) as caught:
        tokenizer_of(path, tmp_path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_scores_are_needed_where_merges_are_missing(tmp_path):
    vocabulary = sentencepiece_vocabulary()
    del vocabulary["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_of(gguf_with(tmp_path, "llama", vocabulary), tmp_path)


def test_no_vocabulary_at_all(tmp_path):
    with pytest.raises(ModelFileError, match="has no tokenizer"):
        tokenizer_of(gguf_with(tmp_path, "llama", {"tokenizer.ggml.eos_token_id": 1}), tmp_path)


def test_cache_is_used_checked_and_rebuilt(tmp_path, monkeypatch):
    path = gguf_with(tmp_path, *VOCABULARIES["gemma"])
    derivations = []
    derive = gguf_tokenizer.derive_merges
    monkeypatch.setattr(
        gguf_tokenizer,
        "derive_merges",
        lambda *arguments: derivations.append(1) or derive(*arguments),
    )

    def ids():
        return tokenizer_of(path, tmp_path / "cache").encode("the tokenizer turns the text")

    first = ids()
    assert ids() == first
    assert len(derivations) == 1
    (cached,) = (tmp_path / "cache").rglob("*.bin")
    whole = cached.read_bytes()
    for damaged in (b"", whole[:-1], whole[:50], whole[:40] + b"\xff" + whole[41:], b"junk" * 100):
        before = len(derivations)
        cached.write_bytes(damaged)
        assert ids() == first
        assert len(derivations) == before + 1
        assert cached.read_bytes() == whole
    # Another file under the same name is another model.
    gguf_with(tmp_path, *VOCABULARIES["gemma"], general__name="other")
    before = len(derivations)
    assert ids() == first
    assert len(derivations) == before + 1


def test_unwritable_cache_only_costs_time(tmp_path):
    path = gguf_with(tmp_path, *VOCABULARIES["gemma"])
    (tmp_path / "file").write_text("in the way")
    assert tokenizer_of(path, tmp_path / "file").encode("the")


def hf_tokenizer(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(hf_folder.load_tokenizer(folder), bos_id=None, eos_ids=())


def test_tokenizer_json(tmp_path):
    path = gguf_with(tmp_path, *VOCABULARIES["qwen2"])
    built = gguf_tokenizer.load(read_gguf(path), tmp_path)
    built.enable_truncation(2)
    built.enable_padding(length=50)
    tokenizer = hf_tokenizer(tmp_path, built)
    ids = tokenizer.encode("the tokenizer turns the text")
    assert len(ids) not in {2, 50}
    assert tokenizer.decode(ids) == "the tokenizer turns the text"


def test_tokenizer_json_that_is_missing_broken_or_foreign(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        hf_folder.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer"):
        hf_folder.load_tokenizer(tmp_path)
    foreign = Backend(models.WordPiece({"[UNK]": 0}))
    foreign.decoder = decoders.WordPiece()
    with pytest.raises(ModelUnsupportedError, match="WordPiece"):
        hf_tokenizer(tmp_path, foreign)


def test_tokenizer_json_decides_what_is_added(tmp_path):
    """Whatever tokenizer_config.json says; transformers is the judge."""
    from transformers import PreTrainedTokenizerFast

    path = gguf_with(tmp_path, *VOCABULARIES["llama"])
    gguf_tokenizer.load(read_gguf(path), tmp_path).save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    for flags in (
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | flags))
        reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        tokenizer = Tokenizer(hf_folder.load_tokenizer(tmp_path), bos_id=1, eos_ids=(2,))
        for add_special in (True, False):
            ids = tokenizer.encode("the dog", add_special=add_special)
            assert ids == reference.encode("the dog", add_special_tokens=add_special), flags


def test_tokens_that_the_model_lacks_are_refused(tmp_path):
    path = gguf_with(tmp_path, *VOCABULARIES["qwen2"])
    backend = gguf_tokenizer.load(read_gguf(path), tmp_path)
    size = backend.get_vocab_size()
    tokenizer = Tokenizer(backend, bos_id=None, eos_ids=(), model_vocab_size=size - 1)
    assert tokenizer.encode("") == []
    assert tokenizer.encode("the <|endoftext|>")[-1] == size - 2
    with pytest.raises(InvalidRequestError, match=r"<\|im_start\|>"):
        tokenizer.encode("the <|im_start|>")


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_through_the_opened_model(tmp_path, architecture):
    """A whole small GGUF, and the same through a Hugging Face folder's side files."""
    gemma = architecture == "gemma3"
    vocabulary = sentencepiece_vocabulary(gemma=True) if gemma else byte_level_vocabulary()
    size = len(vocabulary["tokenizer.ggml.tokens"])
    metadata = metadata_of(architecture) | {f"{architecture}.vocab_size": size} | vocabulary
    tensors = tensors_of(architecture, tied=True)
    tensors["token_embd.weight"] = np.zeros((size, HIDDEN), np.float32)
    template = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    }
    path = write_gguf(tmp_path / "m.gguf", architecture, metadata | template, tensors)
    model = open_model(path)
    tokenizer = model.tokenizer(tmp_path)
    assert tokenizer.vocab_size == model.config.vocab_size == size
    assert tokenizer.bos_id == vocabulary["tokenizer.ggml.bos_token_id"]
    assert tokenizer.eos_ids == model.config.eos_ids
    prompt = model.chat_template().render([{"role": "user", "content": "the"}])
    ids = tokenizer.encode(prompt, add_special=False)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, vocabulary["tokenizer.ggml.eos_token_id"])
    base = write_gguf(tmp_path / "base.gguf", architecture, metadata, tensors)
    assert open_model(base).chat_template() is None
    short = metadata | {f"{architecture}.vocab_size": size - 1}
    with pytest.raises(ModelFileError, match=f"has {size} tokens"):
        open_model(write_gguf(tmp_path / "short.gguf", architecture, short, tensors))


def test_template_tokens(tmp_path):
    path = gguf_with(tmp_path, *VOCABULARIES["llama"])
    assert gguf_tokenizer.template_tokens(read_gguf(path)) == ("<s>", "</s>")
    assert hf_folder.template_tokens(tmp_path) == ("", "")
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf_folder.template_tokens(tmp_path) == ("<s>", "</s>")


@pytest.mark.real_model
def test_the_real_gemma_tokenizes_as_transformers_does(gemma_path, tmp_path):
    """Ids taken from transformers 5.24's AutoTokenizer of the same file."""
    tokenizer = tokenizer_of(gemma_path, tmp_path)
    text = "Hello  world\n 你好 🎉"
    assert tokenizer.encode(text) == [2, 9259, 138, 12392, 107, 43758, 237389, 204906]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 262144
