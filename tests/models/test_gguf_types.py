"""Every type of GGUF that the format's own library can dequantize: read by us, the same numbers."""

import numpy as np
import pytest
from checkpoints import metadata_of, tensors_of, write_gguf
from gguf import GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenpath.models.local import open_model
from tokenpath.models.weights import open_matrix, read_tensor
from tokenpath.protocol.errors import ModelUnsupportedError

NAME = "blk.0.ffn_down.weight"
KEY = "model.layers.0.mlp.down_proj.weight"
ROWS, COLUMNS = 64, 512
DEQUANTIZED = sorted(quants._type_traits, key=lambda kind: kind.name)
"""What the library has code for; 'all GGUF types' of a test that grows with it."""


def model_with(folder, kind, blocks):
    """A model whose feed-forward size fits any block, with raw blocks of a type in one matrix."""
    metadata = metadata_of("qwen2") | {"qwen2.feed_forward_length": COLUMNS}
    tensors = tensors_of("qwen2")
    rng = np.random.default_rng(1)
    for layer in range(2):
        for part in ("gate", "up"):
            shape = (COLUMNS, 64)
            tensors[f"blk.{layer}.ffn_{part}.weight"] = rng.standard_normal(shape, np.float32)
        tensors[f"blk.{layer}.ffn_down.weight"] = rng.standard_normal((ROWS, COLUMNS), np.float32)
    path = folder / "m.gguf"
    write_gguf(path, "qwen2", metadata, tensors, raw={NAME: (blocks, kind)})
    return path


def random_blocks(kind, seed):
    """Bytes at random, but scales that are numbers: a float16 of all ones is none."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // block, size), np.uint8)
    # Clearing the second highest bit of every exponent byte leaves magnitudes below 2.
    return (blocks & 0xBF).reshape(ROWS, -1)


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_every_type_reads_as_the_library_says(kind, tmp_path):
    blocks = random_blocks(kind, kind.value)
    path = model_with(tmp_path, kind, blocks)
    theirs = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == NAME)
    assert theirs.tensor_type == kind
    expected = quants.dequantize(blocks, kind)
    assert np.isfinite(expected).all()
    assert np.unique(expected).size > 2
    model = open_model(path)
    assert model.tensors[KEY].dtype == kind.name
    np.testing.assert_array_equal(read_tensor(model, KEY).numpy(), expected)
    matrix = open_matrix(model, KEY)
    np.testing.assert_array_equal(matrix.floats(7, 30), expected[7:30])


def test_signs_with_one_scale(tmp_path):
    """Q1_0, for which the library has sizes and no code: a set bit is the scale, else less it."""
    kind = GGMLQuantizationType.Q1_0
    blocks = random_blocks(kind, 3)
    model = open_model(model_with(tmp_path, kind, blocks))
    found = read_tensor(model, KEY).numpy()
    for row, block in ((0, 0), (5, 2), (63, 3)):
        raw = blocks[row, block * 18 : (block + 1) * 18]
        scale = raw[:2].view(np.float16)[0].astype(np.float32)
        for place in (0, 1, 9, 127):
            bit = raw[2 + place // 8] >> (place % 8) & 1
            assert found[row, block * 128 + place] == (scale if bit else -scale)


def test_doubles(tmp_path):
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
    path = model_with(tmp_path, GGMLQuantizationType.F64, values.view(np.uint8))
    model = open_model(path)
    expected = values.astype(np.float32)
    np.testing.assert_array_equal(read_tensor(model, KEY).numpy(), expected)
    np.testing.assert_array_equal(open_matrix(model, KEY).floats(0, 3), expected[:3])


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "I8", "I16", "I64"])
def test_types_that_hold_no_weights_are_named(kind, tmp_path):
    kind = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.zeros((ROWS, COLUMNS // block * size), np.uint8)
    model = open_model(model_with(tmp_path, kind, blocks))
    with pytest.raises(ModelUnsupportedError, match=f"tensors of type {kind.name}"):
        read_tensor(model, KEY)
    with pytest.raises(ModelUnsupportedError, match=f"tensors of type {kind.name}"):
        open_matrix(model, KEY).floats(0, 1)


def test_the_list_is_what_the_docs_say():
    """docs/reference/formats.md names every type."""
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs/reference/formats.md").read_text()
    for kind in DEQUANTIZED:
        assert f"{kind.name}" in page, kind.name
