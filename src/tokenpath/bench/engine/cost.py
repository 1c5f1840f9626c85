"""What a work asks of the machine at the least: bytes of memory to read, operations to compute.

Beside the machine's own limits (``roofline``) they say how much is left to be gained.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenpath.models.architecture import KvDtype, ModelConfig


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A loaded model's share in every step."""

    weight_bytes: int
    """Weights that a step reads, whatever its tokens: all but an embedding table of its own."""
    token_operations: int
    """Of the products with weights, for one token, without the head's; a multiply-add is two."""
    head_operations: int
    """Of the head's product, for one sampled token."""
    full_kv_bytes: int
    """Keys and values of one token in the layers that see all of the context."""
    sliding_kv_bytes: int
    """The same in the layers that see a window."""
    window: int

    def kv_bytes(self, context_tokens: float) -> float:
        """Keys and values that one sequence's next token reads."""
        windowed = min(context_tokens, self.window) * self.sliding_kv_bytes
        return context_tokens * self.full_kv_bytes + windowed

    def step_bytes(self, sequences: int, context_tokens: float) -> float:
        """What one step of decoding reads."""
        return self.weight_bytes + sequences * self.kv_bytes(context_tokens)


def model_cost(
    config: ModelConfig, *, weight_bytes: int, table_element_bytes: int, kv_dtype: KvDtype
) -> ModelCost:
    """Count a model.

    ``weight_bytes`` is what is held in all; ``table_element_bytes`` the size of a number in the
    embedding table, of which a step reads a few rows only, where the head does not share it.
    """
    table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    heads = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    layer = 2 * config.hidden_size * heads + 2 * config.hidden_size * kv
    layer += 3 * config.hidden_size * config.intermediate_size
    sliding = sum(config.kind(index) == "sliding" for index in range(config.layers))
    token_kv = 2 * config.kv_heads * config.kv_head_bytes(kv_dtype)
    return ModelCost(
        weight_bytes=weight_bytes - table * table_element_bytes,
        token_operations=2 * config.layers * layer,
        head_operations=2 * config.vocab_size * config.hidden_size,
        full_kv_bytes=(config.layers - sliding) * token_kv,
        sliding_kv_bytes=sliding * token_kv,
        window=config.sliding_window or 0,
    )
