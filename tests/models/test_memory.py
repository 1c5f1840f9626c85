"""How much a model needs, how much there is, and what `show` says about it."""

import pytest
from checkpoints import HEAD_DIM, KV_HEADS, LAYERS, metadata_of, tensors_of, write_gguf
from gguf.constants import GGMLQuantizationType as Quant
from tests.engine.encoders import CLASSIFIERS, made, saved

from tokenpath.models import choice, memory, show
from tokenpath.models.local import open_model
from tokenpath.models.servable import open_servable
from tokenpath.models.source import PathSource
from tokenpath.protocol.errors import ModelFileError

GIB = 1 << 30


@pytest.fixture
def model(tmp_path):
    tensors = tensors_of("qwen2")
    path = write_gguf(
        tmp_path / "tiny.gguf",
        "qwen2",
        metadata_of("qwen2"),
        tensors,
        quantized={
            "blk.0.attn_q.weight": Quant.Q8_0,
            "blk.1.attn_q.weight": Quant.Q4_0,
            "output.weight": Quant.Q8_0,
        },
    )
    return open_model(path), sum(t.size for t in tensors.values())


def test_parameters_and_weights_do_not_depend_on_how_they_are_stored(model):
    opened, count = model
    assert memory.parameters(opened) == count
    assert memory.weight_bytes(opened, "float32") == 4 * count
    assert memory.weight_bytes(opened, "bfloat16") == 2 * count


def test_a_tied_head_counts_once(tmp_path):
    metadata = metadata_of("gemma3")
    tensors = tensors_of("gemma3", tied=True)
    opened = open_model(write_gguf(tmp_path / "g.gguf", "gemma3", metadata, tensors))
    assert memory.parameters(opened) == sum(t.size for t in tensors.values())


def test_needed_is_weights_and_pool_and_the_stated_overhead(model):
    opened, count = model
    assert memory.needed_bytes(opened, "float32", 1000) == 4 * count + 1000 + GIB


def test_an_estimate_of_a_model_on_disk_reads_the_model(model, tmp_path):
    opened, _ = model
    source = PathSource(opened.path)
    estimate = choice.estimate_bytes(source, tmp_path, "bfloat16", 5)
    assert estimate == memory.needed_bytes(opened, "bfloat16", 5)


class TestAvailable:
    def available(self, tmp_path, own, files, system=24 * GIB):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return memory.available_bytes(
            system_available=lambda: system,
            own_cgroups=tmp_path / "own",
            cgroup_root=tmp_path / "cgroup",
        )

    def test_without_groups_it_is_the_machines(self, tmp_path):
        assert self.available(tmp_path, "0::/\n", {}) == 24 * GIB
        assert (
            memory.available_bytes(system_available=lambda: 7, own_cgroups=tmp_path / "none") == 7
        )

    def test_v2_the_tightest_group_counts_and_page_cache_is_free(self, tmp_path):
        files = {
            "memory.max": "max",
            "memory.current": 9 * GIB,
            "pod/memory.max": 8 * GIB,
            "pod/memory.current": 5 * GIB,
            "pod/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            "pod/box/memory.max": 6 * GIB,
            "pod/box/memory.current": 2 * GIB,
        }
        assert self.available(tmp_path, "0::/pod/box\n", files) == 4 * GIB
        files["pod/memory.current"] = 7 * GIB
        assert self.available(tmp_path, "0::/pod/box\n", files) == 3 * GIB

    def test_v2_in_a_container_the_root_is_the_container(self, tmp_path):
        files = {"memory.max": 2 * GIB, "memory.current": GIB}
        assert self.available(tmp_path, "0::/kubepods/of/the/host\n", files) == GIB

    def test_v1(self, tmp_path):
        own = "9:name=systemd:/\n4:memory:/box\n2:cpu,cpuacct:/\n"
        files = {
            "memory/box/memory.limit_in_bytes": 3 * GIB,
            "memory/box/memory.usage_in_bytes": 2 * GIB,
            "memory/box/memory.stat": f"total_inactive_file {GIB}\n",
        }
        assert self.available(tmp_path, own, files) == 2 * GIB

    def test_v1_has_a_number_for_no_limit(self, tmp_path):
        files = {
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": GIB,
        }
        assert self.available(tmp_path, "4:memory:/\n", files, system=GIB) == GIB

    def test_never_negative(self, tmp_path):
        files = {"memory.max": 1, "memory.current": 5}
        assert self.available(tmp_path, "0::/\n", files) == 0

    def test_on_this_machine(self):
        assert 0 < memory.available_bytes() < 1 << 50


class TestShow:
    def test_tensors_by_the_part_they_play(self, model):
        groups = {g.kind: g for g in show.describe(model[0]).groups}
        assert list(groups) == [
            "embedding",
            "attention q",
            "attention k",
            "attention v",
            "attention o",
            "feed-forward",
            "norms",
            "head",
        ]
        assert set(groups["attention q"].types) == {"Q8_0", "Q4_0", "F32"}  # F32: the biases
        assert groups["head"].types == {"Q8_0": groups["head"].stored_bytes}
        assert groups["norms"].tensors == 2 * LAYERS + 1
        assert groups["feed-forward"].tensors == 3 * LAYERS

    def test_nothing_is_counted_twice_or_left_out(self, model):
        opened, count = model
        found = show.describe(opened)
        assert sum(g.parameters for g in found.groups) == found.parameters == count
        assert sum(g.stored_bytes for g in found.groups) == found.stored_bytes
        assert sum(g.tensors for g in found.groups) == len(opened.tensors)
        for group in found.groups:
            assert sum(group.types.values()) == group.stored_bytes

    def test_query_and_key_norms_are_norms(self, tmp_path):
        path = write_gguf(tmp_path / "q.gguf", "qwen3", metadata_of("qwen3"), tensors_of("qwen3"))
        groups = {g.kind: g.tensors for g in show.describe(open_model(path)).groups}
        assert groups["norms"] == 4 * LAYERS + 1
        assert groups["attention q"] == LAYERS
        assert "other" not in groups

    def test_memory(self, model):
        found = show.describe(model[0])
        per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM
        assert found.kv_bytes_per_1000_tokens == {
            "float32": 4000 * per_token,
            "bfloat16": 2000 * per_token,
            "int8": 1000 * (per_token + 2 * LAYERS * KV_HEADS * 4),
        }
        assert found.weight_bytes["float32"] == 2 * found.weight_bytes["bfloat16"]

    def test_sliding_layers(self, tmp_path):
        path = write_gguf(
            tmp_path / "g.gguf", "gemma3", metadata_of("gemma3"), tensors_of("gemma3", tied=True)
        )
        found = show.describe(open_model(path))
        assert found.tied_embeddings
        assert not found.chat_template
        assert (found.sliding_layers, found.sliding_window) == (LAYERS, 16)

    def test_an_encoder(self, tmp_path):
        found = show.describe_encoder(open_servable(saved(made(CLASSIFIERS["bert-1"]), tmp_path)))
        assert (found.architecture, found.task) == ("BertForSequenceClassification", "rerank")
        assert (found.layers, found.heads, found.dimensions) == (3, 4, 32)
        assert found.max_context_tokens == 64
        assert found.weight_bytes["float32"] == 4 * found.parameters == found.stored_bytes

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_folder_without_a_readable_config(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"config\.json"):
            open_servable(tmp_path)
