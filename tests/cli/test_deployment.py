"""From a spec to models that are ready to be served."""

import pytest
from tests.engine.encoders import ENCODERS, made, saved

from tokenpath.cli.deployment import prepare
from tokenpath.config.spec import Spec
from tokenpath.models import memory
from tokenpath.models.progress import SilentProgress
from tokenpath.protocol.errors import ModelError, ModelFileError, SpecError


def ready(tmp_path, *models, said=None):
    spec = Spec.model_validate({"models": models})
    said = [] if said is None else said
    return prepare(spec, models_dir=tmp_path, progress=SilentProgress(), say=said.append)


def test_a_model_with_its_own_template(tmp_path, tiny_gguf):
    said = []
    (model,) = ready(tmp_path, {"source": str(tiny_gguf)}, said=said)
    assert model.name == "tiny"
    assert model.local.path == tiny_gguf
    assert model.tokenizer.decode(model.tokenizer.encode("the dog")) == "the dog"
    assert model.template.render([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user")
    assert said[-1].startswith("Model tiny: qwen2, ")


def test_a_template_of_the_specs(tmp_path, tiny_gguf):
    template = tmp_path / "t.jinja"
    template.write_text("[{{ messages[0].content }}|{{ eos_token }}]")
    source = {"source": str(tiny_gguf), "chat_template": str(template)}
    (model,) = ready(tmp_path, source)
    assert model.template.render([{"role": "user", "content": "hi"}]) == "[hi|<|im_start|>]"
    template.write_text("{% if %}")
    with pytest.raises(ModelFileError, match="not valid Jinja"):
        ready(tmp_path, source)
    template.unlink()
    with pytest.raises(SpecError, match=r"t\.jinja cannot be read"):
        ready(tmp_path, source)


def test_names(tmp_path, tiny_gguf):
    source = str(tiny_gguf)
    models = ready(tmp_path, {"source": source, "name": "a"}, {"source": source})
    assert [model.name for model in models] == ["a", "tiny"]
    with pytest.raises(SpecError, match="two models are called 'tiny'"):
        ready(tmp_path, {"source": source}, {"source": source, "name": "tiny"})


def test_what_cannot_be_served(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    with pytest.raises(ModelFileError, match=r"broken\.gguf"):
        ready(tmp_path, {"source": str(broken)})
    with pytest.raises(ModelError, match="nowhere"):
        ready(tmp_path, {"source": "/nowhere.gguf"})


def test_the_first_that_fits_is_served_and_why_is_said(tmp_path, tiny_gguf, monkeypatch):
    listed = {"source": ["qwen2.5-coder-1.5b", str(tiny_gguf)]}
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_500_000_000)
    said = []
    (model,) = ready(tmp_path, listed, said=said)
    assert model.name == "tiny"
    assert f"Serving {tiny_gguf}: qwen2.5-coder-1.5b would not fit" in said[0]
    monkeypatch.setattr(memory, "available_bytes", lambda: 100_000_000)
    with pytest.raises(ModelError, match="no model fits"):
        ready(tmp_path, listed)


def test_a_model_named_alone_is_tried_with_a_warning(tmp_path, tiny_gguf, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 100_000_000)
    said = []
    ready(tmp_path, {"source": str(tiny_gguf)}, said=said)
    assert "may not fit in memory" in said[0]


def test_models_share_the_memory(tmp_path, tiny_gguf, monkeypatch):
    source = str(tiny_gguf)
    monkeypatch.setattr(memory, "available_bytes", lambda: 3_500_000_000)
    said = []
    ready(tmp_path, {"source": source, "name": "a"}, {"source": source, "name": "b"}, said=said)
    assert [line.partition(":")[0] for line in said] == ["Warning", "Model a", "Model b"]
    assert "1.4 GB available" in said[0]  # what the first leaves of 3.5 GB


def test_an_encoder_is_ready_with_its_own_tokenizer(tmp_path):
    folder = saved(made(ENCODERS["bert"]), tmp_path / "encoder")
    (model,) = ready(tmp_path, {"source": str(folder)})
    assert (model.task, model.template) == ("embed", None)
    assert model.inputs.single("the cat").token_ids == [2, 4, 6, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chat_template": "any"}, "chat_template"),
        ({"engine": {"dtype": "int8"}}, "'float32' or 'bfloat16'"),
        ({"engine": {"task": "generate"}}, "it can embed"),
    ],
)
def test_what_an_encoder_cannot_do(fields, words, tmp_path):
    folder = saved(made(ENCODERS["bert"]), tmp_path / "encoder")
    with pytest.raises(SpecError, match=words):
        ready(tmp_path, {"source": str(folder), **fields})
