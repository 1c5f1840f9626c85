import os
import subprocess
import sys
from pathlib import Path

import pytest

# The builders of small checkpoints.
sys.path.append(str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Every test has a state of its own."""
    home = tmp_path / "home"
    monkeypatch.setenv("TOKENPATH_HOME", str(home))
    monkeypatch.setenv("TOKENPATH_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("TOKENPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENPATH_DEBUG", raising=False)
    return home


@pytest.fixture
def tokenpath():
    """Runs the command as a user does: ``tokenpath("keys", "list")``."""

    def run(*arguments, timeout=60, **options):
        return subprocess.run(
            [sys.executable, "-m", "tokenpath.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "COLUMNS": "100"},
            **options,
        )

    return run


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A random model that loads in a moment, with a chat template."""
    import checkpoints
    import numpy as np

    vocabulary = checkpoints.byte_level_vocabulary()
    size = len(vocabulary["tokenizer.ggml.tokens"])
    rng = np.random.default_rng(0)
    tensors = checkpoints.tensors_of("qwen2") | {
        name: rng.standard_normal((size, checkpoints.HIDDEN)).astype(np.float32)
        for name in ("token_embd.weight", "output.weight")
    }
    metadata = {
        **checkpoints.metadata_of("qwen2"),
        **vocabulary,
        "qwen2.vocab_size": size,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return checkpoints.write_gguf(path, "qwen2", metadata, tensors)
