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
def test_a_probe_takes_the_best_method_and_measures_with_it(dtype, monkeypatch):
    monkeypatch.setattr(roofline, "_METHOD_S", 0.0)
    monkeypatch.setattr(roofline, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "last_level_cache_bytes", lambda: 1 << 18)
    monkeypatch.setattr(roofline, "ROWS", 16)
    torch.set_num_threads(1)
    probe = roofline.Probe(dtype, threads=2)
    found = probe.roofline
    assert found.operand_bytes == 1 << 20
    assert found.read_bytes_per_s == found.read_methods[found.read_method]
    assert found.read_bytes_per_s == max(found.read_methods.values())
    assert found.product_ops_per_s == found.product_methods[found.product_method]
    assert found.product_ops_per_s == max(found.product_methods.values())
    now = probe()
    assert now.read_bytes_per_s > 0
    assert now.product_ops_per_s > 0
    assert torch.get_num_threads() == 1
    assert ("oneDNN" in found.product_methods) == (dtype == "int8")


def test_operands_are_larger_than_the_cache_and_bounded():
    mib = 1 << 20
    assert roofline.operand_bytes(8 * mib) == 256 * mib
    assert roofline.operand_bytes(100 * mib) == 400 * mib
    assert roofline.operand_bytes(200 * mib) == 512 * mib
    assert roofline.operand_bytes(480 * mib) == 540 * mib
