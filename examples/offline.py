"""A batch of prompts, without a server: ``.venv/bin/python examples/offline.py``."""

from tokenpath import Engine, SamplingParams

prompts = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,"]

with Engine("gemma-3-270m") as engine:
    for prompt, done in zip(
        prompts, engine.generate(prompts, SamplingParams(max_tokens=24)), strict=True
    ):
        print(f"{prompt!r} -> {done.text!r}  ({done.finish_reason})")
