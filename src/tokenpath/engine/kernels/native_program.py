"""Turns a loaded decoder into one native program.

A decoder of packed weights is read once, block by block, and becomes a list of operations. A step
is then a single call without Python in between. The module behind it is ``native/``; its
``program.h`` says how a program runs.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.kernels.balance import key_balance
from tokenpath.engine.kernels.base import AttentionSpec, Linear
from tokenpath.engine.kernels.native_reducer import NativeReducer
from tokenpath.engine.kernels.packed import PackedMatrix
from tokenpath.engine.kv_cache import KvCache, KvLayer
from tokenpath.engine.layers import Attention, Block, Decoder, RMSNorm
from tokenpath.engine.rotary import Rotary
from tokenpath.models.architecture import LayerKind, ModelConfig
from tokenpath.protocol.errors import ReplicaLostError

_ALIGNED = 32
"""What the kernels want sizes to be multiples of."""
_GATED = 16
"""Gate's and partner's rows alternate in so many."""
_KV_GROUP = 16
"""Tokens whose keys are interleaved."""


def obstacle(config: ModelConfig, block_tokens: int, parts: int = 1) -> str | None:
    """Why a model, or each of so many parts of it, cannot run natively; None if it can."""
    sizes = {
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "head size": config.head_dim,
    }
    for name, size in sizes.items():
        if size % _ALIGNED:
            return f"its {name} {size} is no multiple of {_ALIGNED}"
    if config.head_dim > 256:  # noqa: PLR2004 - MAX_HEAD_DIM of kv.h
        return f"its head size {config.head_dim} is above 256"
    if config.heads // config.kv_heads > 48:  # noqa: PLR2004 - UNIT_ROWS of attention_products.h
        return "more than 48 query heads share a KV head"
    if block_tokens % _KV_GROUP:
        return f"block_tokens is {block_tokens}, no multiple of {_KV_GROUP}"
    if config.intermediate_size // parts % _GATED:
        return (
            f"its feed-forward size {config.intermediate_size}, divided by {parts}, is no multiple "
            f"of {_GATED}"
        )
    return None


class NativeProgram:
    """A decoder's forward pass. Not thread-safe: one step at a time."""

    def __init__(
        self,
        native: Any,
        kernels: str,
        decoder: Decoder,
        *,
        cache: KvCache,
        rotaries: dict[LayerKind, Rotary],
        block_tokens: int,
        threads: int,
        meeting: Any = None,
    ) -> None:
        """Write the program of a decoder of packed weights; the decoder is not needed after.

        ``meeting`` is where the parts of a model that is divided by rows exchange what they make.
        """
        self.kernels = kernels
        """Name of the instruction set."""
        self._native = native
        self._team = native.Team(threads)
        self._program = native.Program(self._team, kernels)
        self.reducer = NativeReducer(native, self._team, kernels)
        self._kept: list[object] = [cache]
        """What the program holds addresses of."""
        self._buffers: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._softcap = decoder.logit_softcap
        self._vocab = decoder.vocab_size
        self._cache = cache
        self._share = decoder.backend.share
        self._width = decoder.blocks[0].mlp_norm.weight.shape[-1]
        """Of the residual."""
        self._residual = -1
        """The buffer that a stage begins and ends with."""
        if meeting is not None:
            self._program.join(meeting)
        indices: dict[int, int] = {}
        self._rotary: dict[LayerKind, int] = {}
        for kind, rotary in rotaries.items():
            if id(rotary) not in indices:
                frequencies = rotary.inverse_frequencies.tolist()
                indices[id(rotary)] = self._program.rotary(frequencies, rotary.magnitude)
            self._rotary[kind] = indices[id(rotary)]
        self._write(decoder)

    def run(self, batch: StepBatch, before: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [sampled rows, vocab]; keys and values of the step are in the pool after.

        In a stage that is not the first, ``before`` is what the one before made, float32 [T,
        hidden]; one that is not the last returns the same for the next. Only part 0 has logits.
        Raises ``ReplicaLostError`` if another part does not come to an exchange.
        """
        share = self._share
        if before is not None:
            self._program.fill(self._residual, before.numpy())
        has_logits = share.last and share.part == 0
        logits = torch.empty(len(batch.sampled_rows) if has_logits else 0, self._vocab)
        together = self._program.run(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.row_starts,
            batch.context_tokens,
            batch.block_tables,
            batch.sampled_rows,
            logits.numpy(),
        )
        if not together:
            raise ReplicaLostError("a rank of this engine did not come to an exchange in time")
        if not share.last:
            made = torch.empty(len(batch.token_ids), self._width)
            self._program.copy(self._residual, made.numpy())
            return made
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _write(self, decoder: Decoder) -> None:
        program, share, hidden = self._program, self._share, self._width
        self._residual = residual = self._buffer("residual", hidden)
        normed = self._buffer("normed", hidden, quantized=True)
        head = None if decoder.head is None else self._matrix(decoder.head)
        if decoder.embedding is not None:
            tied = decoder.head is decoder.embedding
            table = head if tied else self._matrix(decoder.embedding)
            scale = 1.0 if decoder.embedding_scale is None else decoder.embedding_scale
            first = share.part * _packed(decoder.embedding).rows
            program.embed(residual, table, scale, first)
            if share.parts > 1:
                program.exchange_rows(residual, hidden, first, _packed(decoder.embedding).rows)
        for block in decoder.blocks:
            self._norm_quantize(block.attention_norm, residual, normed, block.attention.qkv)
            attended = self._attention(block.attention, normed)
            sampled = share.last and block is decoder.blocks[-1]
            if sampled:
                # All keys and values are written: what is left serves the logits alone.
                attended = self._gather("attended, sampled", attended, _attended(block.attention))
                residual = self._gather("residual, sampled", residual, hidden)
            self._advance(block, attended, residual, sampled=sampled)
        if decoder.head is None or decoder.norm is None:
            return
        ready = self._buffer("ready", hidden, quantized=True)
        self._norm_quantize(decoder.norm, residual, ready, decoder.head, sampled=True)
        if share.parts == 1:
            program.matmul(ready, -1, head, False, "", True)
            return
        held = _packed(decoder.head).rows
        logits = self._buffer("logits", held, sampled=True)
        program.matmul(ready, logits, head, False, "", True)
        program.exchange(logits, -1, held, share.part * held, self._vocab, True)

    def _gather(self, role: str, source: int, columns: int) -> int:
        """The rows that are sampled of a buffer."""
        to = self._buffer(role, columns)
        self._program.gather(source, to, columns)
        return to

    def _advance(self, block: Block, attended: int, residual: int, *, sampled: bool) -> None:
        """Write what follows attention in a block; ``sampled`` as the operations have it."""
        program = self._program
        attention_norm = getattr(block, "attention_out_norm", None)
        mlp_norm = getattr(block, "mlp_out_norm", None)
        out, gate_up, down = block.attention.out, block.mlp.gate_up, block.mlp.down
        width = _packed(out).columns
        if self._share.parts > 1:
            whole = self._buffer("attended by all", width)
            self._exchange(attended, whole, width, sampled=sampled)
            attended = whole
        rounded = self._buffer("attended, rounded", width, quantized=True)
        program.quantize(attended, rounded, width, _by_run(out), sampled=sampled)
        self._project(out, rounded, residual, attention_norm, sampled=sampled)
        normed = self._buffer("normed", _packed(gate_up).columns, quantized=True)
        self._norm_quantize(block.mlp_norm, residual, normed, gate_up, sampled=sampled)
        width = _packed(down).columns
        joined = self._buffer("joined", width)
        rounded = self._buffer("joined, rounded", width, quantized=True)
        matrix = self._matrix(gate_up)
        first = self._share.part * (_packed(gate_up).rows // 2)
        program.matmul(normed, joined, matrix, False, block.mlp.activation, sampled, first)
        self._exchange(joined, joined, width, sampled=sampled)
        program.quantize(joined, rounded, width, _by_run(down), sampled=sampled)
        self._project(down, rounded, residual, mlp_norm, sampled=sampled)

    def _exchange(self, source: int, to: int, columns: int, *, sampled: bool) -> None:
        """Make ``to``, of so many columns, whole of what each part has of it.

        A ``source`` that is another buffer holds this part's columns alone.
        """
        parts = self._share.parts
        if parts > 1:
            width = columns // parts
            self._program.exchange(source, to, width, self._share.part * width, columns, sampled)

    def _buffer(
        self, role: str, columns: int, *, quantized: bool = False, sampled: bool = False
    ) -> int:
        """The buffer of a role, which all layers share: each is done with it before the next.

        One for ``sampled`` rows has no room for others.
        """
        name = f"{role} {columns}"
        if name not in self._buffers:
            self._buffers[name] = int(self._program.buffer(columns, quantized, sampled))
        return self._buffers[name]

    def _norm_quantize(
        self, norm: RMSNorm, source: int, to: int, product: object, *, sampled: bool = False
    ) -> None:
        """Round what a product eats next."""
        size = norm.weight.shape[-1]
        self._program.quantize(
            source, to, size, _by_run(product), self._address(norm.weight), norm.eps, sampled
        )

    def _attention(self, attention: Attention, source: int) -> int:
        """Write everything from the normed input to the attended output."""
        program, spec = self._program, attention.spec
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        projected = self._buffer("projected", rows)
        program.matmul(source, projected, self._matrix(attention.qkv), False, "", False)
        shape = self._shape(spec)
        pool = self._pool(self._cache.layers[attention.layer])
        norm = attention.query_key_norm
        program.split(
            projected,
            shape,
            pool,
            0 if norm is None else self._address(norm.weight),
            0.0 if norm is None else norm.eps,
            self._balance(attention),
            self._rotary[attention.kind],
        )
        attended = self._buffer("attended", _attended(attention))
        program.attend(attended, shape, pool)
        return attended

    def _project(
        self, linear: Linear, source: int, residual: int, norm: RMSNorm | None, *, sampled: bool
    ) -> None:
        """Add a product to the residual, normed first where the family does that."""
        matrix, size = self._matrix(linear), self._width
        first = self._share.part * _packed(linear).rows
        if norm is None:
            self._program.matmul(source, residual, matrix, True, "", sampled, first)
            self._exchange(residual, residual, size, sampled=sampled)
            return
        made = self._buffer("made", size)
        self._program.matmul(source, made, matrix, False, "", sampled, first)
        self._exchange(made, made, size, sampled=sampled)
        weight = self._address(norm.weight)
        self._program.norm(made, residual, size, weight, norm.eps, True, sampled)

    def _shape(self, spec: AttentionSpec) -> Any:
        return self._native.AttentionShape(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            spec.window or 0,
            spec.softcap or 0.0,
        )

    def _balance(self, attention: Attention) -> int:
        if self._cache.layers[attention.layer].key_scales is None:
            return 0
        spec, bias = attention.spec, _packed(attention.qkv).bias
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        norm = attention.query_key_norm
        factors = key_balance(
            spec,
            bias=None if bias is None else torch.from_numpy(bias[:rows]),
            norm=None if norm is None else norm.weight,
        )
        return 0 if factors is None else self._address(factors)

    def _pool(self, layer: KvLayer) -> Any:
        addresses = (
            0 if tensor is None else tensor.data_ptr()
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        )
        return self._native.KvPool(*addresses, self._block_tokens)

    def _address(self, tensor: torch.Tensor) -> int:
        held = tensor.float().contiguous()
        self._kept.append(held)
        return held.data_ptr()

    def _matrix(self, linear: object) -> Any:
        """A packed matrix, or a table, as the program takes it."""
        matrix = _packed(linear)
        self._kept.append(matrix)
        bias = 0 if matrix.bias is None else matrix.bias.ctypes.data
        return self._native.weights(
            matrix.bits, matrix.rows, matrix.columns, matrix.data, matrix.scale, bias
        )


def _attended(attention: Attention) -> int:
    """Columns of what a rank's heads put out."""
    return attention.spec.heads * attention.spec.head_dim


def _packed(linear: object) -> PackedMatrix:
    assert isinstance(linear, PackedMatrix), "a decoder of packed weights"
    return linear


def _by_run(product: object) -> bool:
    """Whether a product wants a scale for every 128 activations."""
    return _packed(product).bits == 8  # noqa: PLR2004 - 8 bits
