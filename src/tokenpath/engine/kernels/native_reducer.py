"""The sampler's passes over whole vocabularies, on the native program's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenpath.engine.rows import Floats


@dataclass(frozen=True, slots=True)
class NativeReducer:
    """A ``Reducer``. Not to be used while the program of the same team runs."""

    native: Any
    team: Any
    kernels: str

    def maxima(self, chunks: torch.Tensor) -> Floats:
        found = np.empty(chunks.shape[:2], np.float32)
        self.native.chunk_maxima(self.team, self.kernels, chunks.contiguous().numpy(), found)
        return found

    def sums(self, chunks: torch.Tensor, best: Floats, temperatures: Floats) -> Floats:
        found = np.empty(chunks.shape[:2], np.float32)
        logits = chunks.contiguous().numpy()
        self.native.chunk_sums(self.team, self.kernels, logits, best, temperatures, found)
        return found
