"""An encoder's tensors, taken one at a time in the type that they are computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpath.models.encoder_model import EncoderModel
from tokenpath.models.stored import read_stored

Progress = Callable[[str, float], None]


@dataclass(slots=True)
class EncoderWeights:
    """Reads a checkpoint whose tensors were checked when it was opened."""

    model: EncoderModel
    dtype: torch.dtype
    device: str
    progress: Progress | None = None
    weight_bytes: int = 0
    """Memory of everything taken so far."""
    _taken: int = 0

    def take(self, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, in the model's dtype unless another is named.

        Raises ``ModelFileError`` if the file shrank since it was opened.
        """
        stored = read_stored(self.model.tensors[name])
        tensor = stored.to(device=self.device, dtype=dtype or self.dtype)
        self.weight_bytes += tensor.nbytes
        self._taken += 1
        if self.progress is not None:
            self.progress("weights", self._taken / len(self.model.tensors))
        return tensor
