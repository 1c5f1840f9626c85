"""A ``tokenizers`` tokenizer from GGUF metadata, which has a vocabulary but no ``tokenizer.json``.

The ids are those of transformers' conversion, so that prompts mean the same to both. A
SentencePiece vocabulary carries no merges: they are derived from it, which takes seconds for
262,144 tokens, so they are kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tokenpath.models.gguf_file import GgufFile
from tokenpath.models.merges_cache import cache_path, read_merges, write_merges
from tokenpath.models.tokenizer import BYTE_ALPHABET
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

_ALPHABET = frozenset(BYTE_ALPHABET)
_CONTROL, _USER_DEFINED = 3, 4
_SPACE_MARK = "▁"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def load(file: GgufFile, cache_dir: Path) -> Tokenizer:
    """The tokenizer of a GGUF; what is slow to derive is kept in ``cache_dir``.

    Raises ``ModelFileError`` if keys are missing or contradict each other, and
    ``ModelUnsupportedError`` for a kind of tokenizer that is not known here.
    """
    tokens, types = _vocabulary(file)
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
        # In a byte-level vocabulary a control token outside the alphabet is a converter's mistake.
        control = [
            t
            for t, c in zip(tokens, types, strict=True)
            if c == _CONTROL and _ALPHABET.issuperset(t)
        ]
    elif kind == "llama":
        gemma = (file.text("general.architecture") or "").startswith("gemma")
        make = _gemma if gemma else _sentencepiece
        tokenizer = make(file, tokens, cache_path(cache_dir, file.path))
        control = [t for t, c in zip(tokens, types, strict=True) if c == _CONTROL]
    else:
        raise ModelUnsupportedError(
            f"{file.path} has tokenizer.ggml.model {kind!r}; supported: gpt2, llama"
        )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    user_defined = [t for t, c in zip(tokens, types, strict=True) if c == _USER_DEFINED]
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t in user_defined
            if tokenizer.token_to_id(t) is not None
        ]
    )
    _add_special(tokenizer, file, tokens)
    return tokenizer


def template_tokens(file: GgufFile) -> tuple[str, str]:
    """The texts of ``bos_token`` and ``eos_token``, as chat templates use them; empty if none."""
    tokens = file.array("tokenizer.ggml.tokens")
    texts = tokens.strings() if tokens is not None else []
    ids = (file.integer(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    bos, eos = ("" if i is None or not 0 <= i < len(texts) else texts[i] for i in ids)
    return bos, eos


def _vocabulary(file: GgufFile) -> tuple[list[str], Sequence[float]]:
    array = file.array("tokenizer.ggml.tokens")
    if array is None:
        raise ModelFileError(f"{file.path} has no tokenizer: it lacks 'tokenizer.ggml.tokens'")
    types = file.array("tokenizer.ggml.token_type")
    if types is None:
        return array.strings(), [0] * array.count
    if types.count != array.count:
        raise ModelFileError(
            f"{file.path} has {array.count} tokens, but {types.count} entries in "
            "'tokenizer.ggml.token_type'"
        )
    return array.strings(), types.numbers()


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    letters = {byte: character for character, byte in BYTE_ALPHABET.items()}
    vocab = {
        token
        if _ALPHABET.issuperset(token)
        else "".join(letters[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    tokenizer = _bpe(file, vocab, _stated_merges(file) or [])
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    name = file.text("tokenizer.ggml.pre") or "default"
    if name in {"gpt2", "gpt-2", "default"}:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    split = _SPLITS.get(name)
    if split is None:
        known = sorted({"gpt-2", "default", "smollm", *_SPLITS})
        raise ModelUnsupportedError(
            f"{file.path} has tokenizer.ggml.pre {name!r}; supported: {', '.join(known)}"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_SPLITS = {
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
}


def _sentencepiece(file: GgufFile, tokens: list[str], cache: Path) -> Tokenizer:
    """Llama's kind: merges by score, and usually a space before the first word."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _stated_merges(file)
    if merges is None:
        merges = _cached_merges(cache, tokens, vocab, lambda: _scores(file, tokens))
    tokenizer = _bpe(file, vocab, merges, fuse_unk=True, byte_fallback=True)
    prefix = file.flag("tokenizer.ggml.add_space_prefix") is not False
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE_MARK, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _gemma(file: GgufFile, tokens: list[str], cache: Path) -> Tokenizer:
    """Gemma's kind: no space before the first word, and scores that do not tell the merge order.

    Its runs of spaces are stored as spaces, though the model's text has U+2581 in their place; and
    the order of merges is the order of tokens.
    """
    spelled = [
        _SPACE_MARK * len(token) if token[:2] == "  " and not token.strip(" ") else token
        for token in tokens
    ]
    vocab = {token: index for index, token in enumerate(spelled)}
    merges = _stated_merges(file)
    if merges is None:
        merges = _cached_merges(
            cache, spelled, vocab, lambda: {token: -index for token, index in vocab.items()}
        )
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    tokenizer = _bpe(
        file,
        vocab,
        merges,
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown is None else _token_at(file, tokens, unknown),
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _bpe(
    file: GgufFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception
        raise ModelFileError(f"{file.path} has an inconsistent vocabulary: {error}") from None


def _token_at(file: GgufFile, tokens: list[str], index: int) -> str:
    if not 0 <= index < len(tokens):
        raise ModelFileError(
            f"{file.path} names the special token {index}, but has {len(tokens)} tokens"
        )
    return tokens[index]


def derive_merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to cut a token into two others.

    Best score first; within a score the longer left part first, then the longer right part, then
    the order of the vocabulary.
    """
    found = [
        (score, cut, len(token) - cut, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _cached_merges(
    cache: Path,
    tokens: list[str],
    vocab: Mapping[str, int],
    scores: Callable[[], Mapping[str, float]],
) -> list[tuple[str, str]]:
    known = read_merges(cache, len(tokens))
    if known is not None:
        return [(tokens[left], tokens[right]) for left, right in known]
    merges = derive_merges(vocab, scores())
    write_merges(cache, ((vocab[left], vocab[right]) for left, right in merges))
    return merges


def _stated_merges(file: GgufFile) -> list[tuple[str, str]] | None:
    array = file.array("tokenizer.ggml.merges")
    if array is None:
        return None
    merges = []
    for line in array.strings():
        left, _, right = line.partition(" ")
        merges.append((left, right))
    return merges


def _scores(file: GgufFile, tokens: list[str]) -> dict[str, float]:
    array = file.array("tokenizer.ggml.scores")
    if array is None or array.count != len(tokens):
        raise ModelFileError(
            f"{file.path} has neither 'tokenizer.ggml.merges' nor one of 'tokenizer.ggml.scores' "
            f"for each of its {len(tokens)} tokens"
        )
    return dict(zip(tokens, array.numbers(), strict=True))


def _add_special(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Make ``encode`` add what the model wants around a document."""
    # Files from before the flag existed: llama.cpp adds it to SentencePiece vocabularies.
    default = file.text("tokenizer.ggml.model") == "llama"
    stated = file.flag("tokenizer.ggml.add_bos_token")
    around: dict[str, tuple[str, int]] = {}
    for name, wanted in (
        ("bos", default if stated is None else stated),
        ("eos", file.flag("tokenizer.ggml.add_eos_token")),
    ):
        token_id = file.integer(f"tokenizer.ggml.{name}_token_id")
        if wanted and token_id is not None:
            around[name] = (_token_at(file, tokens, token_id), token_id)
    pattern = [around["bos"][0]] if "bos" in around else []
    pattern.append("$A")
    pattern += [around["eos"][0]] if "eos" in around else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=list(around.values())
    )
