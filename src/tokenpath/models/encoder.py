"""The architecture of an encoder: a transformer that reads a whole text at once and writes none.

BERT and RoBERTa (and what is trained from them: MiniLM, E5, BGE, GTE, cross-encoders) differ in the
number of their first position and in their classification heads. ``encoder_config`` reads a
``config.json`` of either; ``encoder_shapes`` says which tensors such a checkpoint must hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenpath.models.layout import MAX_LAYERS, Shape
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

Family = Literal["bert", "roberta"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
Scoring = Literal["identity", "sigmoid", "softmax"]

_FAMILIES: Mapping[str, Family] = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_CLASSIFIER = "ForSequenceClassification"
_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction")
"""Endings of architectures whose heads, if any, have nothing to do with embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A transformer with absolute positions, a norm after each part, and attention both ways."""

    family: Family
    architecture: str
    """The name the checkpoint gave itself, for people: ``BertModel``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Rows of the table of positions."""
    first_position: int
    """Of a text's first token. RoBERTa keeps the rows before it for padding."""
    token_types: int
    norm_eps: float
    activation: Activation
    labels: tuple[str, ...] = ()
    """What a classification head decides between; empty without a head."""
    scoring: Scoring = "identity"
    """What turns the head's logits into its answer."""

    @property
    def max_context_tokens(self) -> int:
        """Tokens that have a position."""
        return self.positions - self.first_position

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class _Json(msgspec.Struct, frozen=True):
    """What we read of a ``config.json``; defaults are those of transformers' classes."""

    vocab_size: Size = 30522
    hidden_size: Size = 768
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = 12
    num_attention_heads: Size = 12
    intermediate_size: Size = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: Annotated[float, Meta(gt=0)] = 1e-12
    pad_token_id: Annotated[int, Meta(ge=0)] | None = None
    position_embedding_type: str | None = "absolute"
    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None
    num_labels: Size | None = None
    problem_type: str | None = None
    is_decoder: bool | None = False
    quantization_config: dict[str, Any] | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes one of the encoders that this module knows."""
    return raw.get("model_type") in _FAMILIES


def encoder_config(raw: Mapping[str, Any], source: Path) -> EncoderConfig:
    """The architecture that a ``config.json`` describes; ``source`` is its path, for messages.

    Raises ``ModelFileError`` on a value of the wrong type or range and ``ModelUnsupportedError`` on
    a variant that the engine lacks.
    """
    try:
        found = msgspec.convert(raw, type=_Json)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{source} is not a configuration that can be read: {error}") from None
    family = _FAMILIES[raw["model_type"]]
    _reject_variants(found, source)
    if found.hidden_size % found.num_attention_heads:
        raise ModelFileError(
            f"{source}: a hidden size of {found.hidden_size} cannot be divided among "
            f"{found.num_attention_heads} heads"
        )
    padding = found.pad_token_id if found.pad_token_id is not None else 1
    first = padding + 1 if family == "roberta" else 0
    if first >= found.max_position_embeddings:
        raise ModelFileError(
            f"{source}: the first position is {first}, but there are only "
            f"{found.max_position_embeddings}"
        )
    architecture = found.architectures[0] if found.architectures else raw["model_type"]
    labels = _labels(found, architecture, source)
    return EncoderConfig(
        family=family,
        architecture=architecture,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        layers=found.num_hidden_layers,
        heads=found.num_attention_heads,
        positions=found.max_position_embeddings,
        first_position=first,
        token_types=found.type_vocab_size,
        norm_eps=found.layer_norm_eps,
        activation=_ACTIVATIONS[found.hidden_act],
        labels=labels,
        scoring=_scoring(found, labels, source),
    )


def encoder_shapes(config: EncoderConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint with this configuration must hold, with its shape.

    The names are those of transformers' ``BertModel``, and of the head beside it.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.token_types, hidden),
        **_norm("embeddings.LayerNorm", hidden),
    }
    for layer in range(config.layers):
        at = f"encoder.layer.{layer}"
        shapes |= {
            **_linear(f"{at}.attention.self.query", hidden, hidden),
            **_linear(f"{at}.attention.self.key", hidden, hidden),
            **_linear(f"{at}.attention.self.value", hidden, hidden),
            **_linear(f"{at}.attention.output.dense", hidden, hidden),
            **_norm(f"{at}.attention.output.LayerNorm", hidden),
            **_linear(f"{at}.intermediate.dense", inner, hidden),
            **_linear(f"{at}.output.dense", hidden, inner),
            **_norm(f"{at}.output.LayerNorm", hidden),
        }
    if config.labels:
        dense, out = head_names(config)
        shapes |= _linear(dense, hidden, hidden) | _linear(out, len(config.labels), hidden)
    return shapes


def head_names(config: EncoderConfig) -> tuple[str, str]:
    """The two matrices of a classification head: before its tanh, and after."""
    if config.family == "bert":
        return "pooler.dense", "classifier"
    return "classifier.dense", "classifier.out_proj"


def _reject_variants(found: _Json, source: Path) -> None:
    if found.hidden_act not in _ACTIVATIONS:
        raise ModelUnsupportedError(
            f"{source}: hidden_act is {found.hidden_act!r}; supported: {', '.join(_ACTIVATIONS)}"
        )
    if found.position_embedding_type not in {None, "absolute"}:
        raise ModelUnsupportedError(
            f"{source}: position_embedding_type is {found.position_embedding_type!r}; supported: "
            "absolute"
        )
    if found.is_decoder:
        raise ModelUnsupportedError(
            f"{source} has is_decoder, but an encoder's attention must go both ways"
        )
    if found.quantization_config is not None:
        method = found.quantization_config.get("quant_method", "unknown")
        raise ModelUnsupportedError(
            f"{source} describes weights quantized by {method!r}; supported for encoders: "
            "unquantized safetensors"
        )


def _labels(found: _Json, architecture: str, source: Path) -> tuple[str, ...]:
    if not architecture.endswith(_CLASSIFIER):
        known = architecture in _FAMILIES or architecture.endswith(_HEADLESS)
        if not known:
            raise ModelUnsupportedError(
                f"{source} has the architecture {architecture!r}; supported: encoders without a "
                f"head, and those that end in {_CLASSIFIER}"
            )
        return ()
    names = found.id2label
    if not names:
        return tuple(f"LABEL_{index}" for index in range(found.num_labels or 2))
    try:
        ordered = sorted((int(index), name) for index, name in names.items())
    except ValueError:
        ordered = []
    if [index for index, _ in ordered] != list(range(len(names))):
        raise ModelFileError(f"{source}: the keys of 'id2label' should be 0 to {len(names) - 1}")
    return tuple(name for _, name in ordered)


def _scoring(found: _Json, labels: tuple[str, ...], source: Path) -> Scoring:
    """As sentence-transformers' cross-encoders decide for one label, and transformers for several.

    A checkpoint may name a module of torch; only the two that cross-encoders use are known.
    """
    if not labels:
        return "identity"
    if len(labels) > 1:
        several = found.problem_type == "multi_label_classification"
        return "sigmoid" if several else "softmax"
    named = (found.sentence_transformers or {}).get("activation_fn")
    named = named or found.sbert_ce_default_activation_function
    if named is None:
        return "sigmoid"
    match str(named).rpartition(".")[2]:
        case "Identity":
            return "identity"
        case "Sigmoid":
            return "sigmoid"
        case _:
            raise ModelUnsupportedError(
                f"{source}: scores are to be made by {named!r}; supported: Identity, Sigmoid"
            )


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
