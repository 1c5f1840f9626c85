"""Small random encoders made with transformers, and their folders as users have them."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sea",
    "tide",
    "moon",
    "bread",
    "is",
    "in",
    "on",
    "high",
    "low",
    "runs",
    "sleeps",
    "and",
    "of",
    "water",
]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB = len(_SPECIAL) + len(WORDS)
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
ENCODERS = {
    "bert": lambda: BertModel(BertConfig(**SIZE)),
    "bert-relu-one-type": lambda: BertModel(
        BertConfig(**SIZE, hidden_act="relu", type_vocab_size=1)
    ),
    "xlm-roberta": lambda: XLMRobertaModel(XLMRobertaConfig(**SIZE, type_vocab_size=1)),
}
CLASSIFIERS = {
    "bert-1": lambda: BertForSequenceClassification(BertConfig(**SIZE, num_labels=1)),
    "bert-3": lambda: BertForSequenceClassification(BertConfig(**SIZE, num_labels=3)),
    "xlm-roberta-1": lambda: XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**SIZE, type_vocab_size=1, num_labels=1)
    ),
}


def made(maker) -> PreTrainedModel:
    """A model with weights that make attention sharp."""
    torch.manual_seed(0)
    model = maker()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            centre = 1.0 if "LayerNorm.weight" in name else 0.0
            tensor.normal_(mean=centre, std=0.3)
    return model.eval()


def word_tokenizer() -> Tokenizer:
    """A token a word, and BERT's tokens around a text or between two."""
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def saved(model: PreTrainedModel, folder: Path, *modules: str, **pooling) -> Path:
    """The model's folder, with sentence-transformers' files if modules are named."""
    model.save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    if modules:
        listed = [
            {"idx": i, "name": str(i), "path": f"{i}_{m}" if i else "", "type": f"st.models.{m}"}
            for i, m in enumerate(("Transformer", *modules))
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        for i, module in enumerate(modules, start=1):
            (folder / f"{i}_{module}").mkdir(exist_ok=True)
            if module == "Pooling":
                (folder / f"{i}_{module}" / "config.json").write_text(json.dumps(pooling))
    return folder


@torch.inference_mode()
def reference_hidden(model: PreTrainedModel, ids: list[int], second: int | None = None):
    """float32 [tokens, hidden] of transformers' own encoder."""
    types = torch.zeros(1, len(ids), dtype=torch.long)
    if second is not None and model.config.type_vocab_size > 1:
        types[0, second:] = 1
    return model(torch.tensor([ids]), token_type_ids=types).last_hidden_state[0]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: list[int], second: int | None = None):
    types = torch.zeros(1, len(ids), dtype=torch.long)
    if second is not None and model.config.type_vocab_size > 1:
        types[0, second:] = 1
    return model(torch.tensor([ids]), token_type_ids=types).logits[0]
