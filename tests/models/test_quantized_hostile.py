"""Whatever a configuration or a header says, it is understood or refused by an error of ours."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.methods import METHODS, read_method
from tokenpath.protocol.errors import ModelError

SUFFIXES = [
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale",
    "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "bias",
]  # fmt: skip
DTYPES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1}
MODULES = ["model.layers.0.mlp.up_proj", "lm_head", "x"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        ["gptq", "gemm", "int", "float", "group", "block", "channel", "re:.*", "re:("]
    )
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
weights = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.integers(-1, 17) | values,
        "type": st.sampled_from(["int", "float"]) | values,
        "symmetric": st.booleans() | values,
        "strategy": st.sampled_from(["tensor", "channel", "group", "block"]) | values,
        "group_size": st.integers(-2, 64) | values,
        "block_structure": st.lists(st.integers(-1, 40), max_size=3) | st.just("8x8") | values,
    },
)
groups = st.dictionaries(
    st.sampled_from(["group_0", "W4A16", "FP8"]),
    st.fixed_dictionaries(
        {},
        optional={
            "targets": st.lists(st.sampled_from(["Linear", "re:.*", *MODULES])) | values,
            "weights": weights | values,
            "format": values,
        },
    )
    | st.lists(st.sampled_from(["Linear", "re:.*"]))
    | values,
)
configs = st.fixed_dictionaries(
    {"quant_method": st.sampled_from(sorted(METHODS)) | values},
    optional={
        "bits": st.sampled_from([2, 3, 4, 8]) | values,
        "group_size": st.integers(-2, 64) | values,
        "sym": st.booleans() | values,
        "desc_act": st.booleans() | values,
        "checkpoint_format": st.sampled_from(["gptq", "gptq_v2"]) | values,
        "dynamic": st.dictionaries(st.sampled_from(["+:.*", "-:x", "("]), values) | values,
        "zero_point": st.booleans() | values,
        "version": st.just("gemm") | values,
        "weight_block_size": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | values,
        "format": st.sampled_from(["pack-quantized", "int-quantized", "float-quantized"]) | values,
        "config_groups": groups | values,
        "ignore": st.lists(st.sampled_from(["lm_head", "re:x"])) | values,
        "sparsity_config": values,
    },
)
headers = st.dictionaries(
    st.tuples(st.sampled_from(MODULES), st.sampled_from(SUFFIXES)),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 40), max_size=3)),
    max_size=8,
)


@pytest.fixture(scope="module")
def shapes_file(tmp_path_factory):
    """What a ``weight_shape`` is read from."""
    path = tmp_path_factory.mktemp("hostile") / "model.safetensors"
    path.write_bytes(bytes(range(1, 256)) * 80)
    return path


@given(config=configs, header=headers)
@settings(max_examples=300)
def test_any_configuration_with_any_header(config, header, shapes_file):
    tensors = {}
    for (module, suffix), (dtype, shape) in header.items():
        info = TensorInfo(
            shape=tuple(shape), dtype=dtype, stored_bytes=0, file=shapes_file, offset=8
        )
        size = info.elements * DTYPES[dtype]
        tensors[f"{module}.{suffix}"] = TensorInfo(
            shape=info.shape, dtype=dtype, stored_bytes=size, file=shapes_file, offset=8
        )
    with contextlib.suppress(ModelError):
        method = read_method({"quantization_config": config}, shapes_file)
        assert method is not None
        for info in method.assemble(tensors).values():
            if info.quantized is not None:
                assert len(info.shape) == 2
                assert info.stored_bytes == sum(part.stored_bytes for part in info.parts)
