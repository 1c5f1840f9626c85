"""The machine's limits: cache sizes as Linux writes them, and that something is measured."""

import pytest
import torch

from tokenpath.bench.engine import roofline


def test_the_last_level_cache_is_the_largest(tmp_path):
    for index, size in enumerate(["48K", "32K", "1024K", "32768K"]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    assert roofline.last_level_cache_bytes(tmp_path) == 32 << 20


def test_without_a_word_about_caches_a_size_is_assumed(tmp_path):
    assert roofline.last_level_cache_bytes(tmp_path) == 32 << 20


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_limits_name_the_best_method(dtype, monkeypatch):
    monkeypatch.setattr(roofline, "_METHOD_S", 0.0)
    monkeypatch.setattr(roofline, "ROWS", 16)
    torch.set_num_threads(1)
    for limit in (roofline.read_limit(1 << 20), roofline.product_limit(dtype, 1 << 20)):
        assert limit.per_s == limit.methods[limit.method] == max(limit.methods.values()) > 0


def limits(read, product):
    return roofline.Roofline(
        read_bytes_per_s=read,
        read_method="r",
        read_methods={"r": read},
        product_ops_per_s=product,
        product_method="p",
        product_methods={"p": product},
        product_dtype="int8",
        cache_bytes=1,
        operand_bytes=4,
    )


def test_the_best_of_several_measurements_is_taken_limit_by_limit():
    assert roofline.best([]) is None
    assert roofline.best([limits(3.0, 1.0), limits(2.0, 5.0)]) == limits(3.0, 5.0)
