"""A GGUF file in another type, by llama.cpp itself: ``SOURCE TARGET Q4_0|Q8_0``.

Types that are quantized already are quantized again, as someone would who has only this file.
"""

from __future__ import annotations

import sys

import llama_cpp as api

_TYPES = {"Q4_0": 2, "Q8_0": 7}


def main(source: str, target: str, kind: str) -> None:
    """Raises ``RuntimeError`` if llama.cpp refuses."""
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = _TYPES[kind]
    parameters.allow_requantize = True
    status = api.llama_model_quantize(source.encode(), target.encode(), parameters)
    if status:
        raise RuntimeError(f"llama_model_quantize answered {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
