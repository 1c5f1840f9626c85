"""The real all-MiniLM-L6-v2 gives the vectors that sentence-transformers gives.

sentence-transformers' own steps are taken here with transformers: tokenize, the mean of the last
layer's vectors, divide by the length.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.test_pooling import vectors
from transformers import AutoModel, AutoTokenizer

from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.pooling.build import build_pooling_engine
from tokenpath.models.servable import open_servable
from tokenpath.models.source import resolve

pytestmark = pytest.mark.real_model

TEXTS = (
    "The tide comes in twice a day.",
    "Twice a day the sea rises and falls.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Brot wird aus Mehl, Wasser und Hefe gebacken.",
    "日本の首都は東京です。",
    "a",
    "sea " * 250,
    "The moon pulls the water of the sea. " * 20,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("all-minilm-l6-v2", models_dir=models_dir(), pull=False)


@pytest.fixture(scope="module")
def reference(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            rows.append(model.eval()(**tokens).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()


def embedded(folder, dtype):
    model = open_servable(folder)
    core = build_pooling_engine(model, EngineSettings(dtype=dtype, threads=1), name="minilm")
    assert (core.card.max_context_tokens, core.card.dimensions) == (256, 384)
    tokenizer = model.input_tokenizer()
    return vectors(core, [tokenizer.single(text, keep=256) for text in TEXTS])


def test_float32_is_equal(folder, reference):
    np.testing.assert_allclose(embedded(folder, "float32"), reference, atol=1e-5)


def test_bfloat16_is_close(folder, reference):
    cosines = (embedded(folder, "bfloat16") * reference).sum(1)
    assert cosines.min() > 0.999
