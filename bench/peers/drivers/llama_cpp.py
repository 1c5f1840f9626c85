"""Drives llama.cpp through its C API, as its server does: one batch a step, its own samplers.

Options: ``unified=yes|no`` (one KV buffer for all sequences, or one each), ``ubatch=N``,
``flash=auto|on|off``. Each work gets a context of just the size it needs, which is what suits
llama.cpp best. The model's weights are loaded once.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp as api
import numpy as np

from bench.peers.drivers.harness import Measured, Settings, serve
from bench.peers.drivers.works import DECODE_STEPS, IDS, Decode, Prefill

_FLASH = {"off": 0, "on": 1, "auto": -1}
_SCORED_AT_ONCE = 256
"""Rows of logits that are kept at a time: 156 MB of them for 152,000 tokens of vocabulary."""


class LlamaCpp:
    """A loaded GGUF."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        self._model = api.llama_model_load_from_file(settings.model.encode(), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {settings.model}")
        self._vocab = api.llama_model_get_vocab(self._model)
        self._vocab_size = api.llama_vocab_n_tokens(self._vocab)

    def prefill(self, work: Prefill) -> Measured:
        with self._context(sequences=1, tokens_each=work.tokens + 1) as context:
            started = time.perf_counter()
            context.compute(work.prompt(), range(work.tokens), [0] * work.tokens, last=1)
            context.sample(1)
            return Measured(work.tokens, time.perf_counter() - started)

    def decode(self, work: Decode) -> Measured:
        count = work.sequences
        tokens_each = work.context + DECODE_STEPS + 1
        with self._context(sequences=count, tokens_each=tokens_each) as context:
            # Speed does not depend on what the KV says: one prompt is computed, and its KV is
            # copied to the other sequences, into cells of their own.
            prompts = work.prompts()
            context.compute(prompts[0], range(work.context), [0] * work.context, last=1)
            context.copy_sequence(range(1, count))
            tokens = [IDS[(7919 * index) % len(IDS)] for index in range(count)]
            started = time.perf_counter()
            for step in range(DECODE_STEPS):
                context.compute(tokens, [work.context + step] * count, range(count), last=count)
                tokens = context.sample(count)
            return Measured(count * DECODE_STEPS, time.perf_counter() - started)

    def score(self, window: Sequence[int]) -> list[float]:
        scores: list[float] = []
        with self._context(sequences=1, tokens_each=len(window)) as context:
            for start in range(0, len(window) - 1, _SCORED_AT_ONCE):
                count = min(_SCORED_AT_ONCE, len(window) - 1 - start)
                span = range(start, start + count)
                context.compute(window[start : start + count], span, [0] * count, last=count)
                rows = context.logits(count).astype(np.float64)
                rows -= rows.max(axis=1, keepdims=True)
                follow = list(window[start + 1 : start + count + 1])
                norms = np.log(np.exp(rows).sum(axis=1))
                scores += (rows[np.arange(count), follow] - norms).tolist()
        return scores

    @contextmanager
    def _context(self, *, sequences: int, tokens_each: int) -> Iterator[_Context]:
        options = self._settings.options
        parameters = api.llama_context_default_params()
        # Cells are counted in 256s; with a buffer for each sequence each is rounded up.
        parameters.n_ctx = sequences * -(-tokens_each // 256) * 256
        parameters.n_seq_max = sequences
        parameters.n_batch = max(tokens_each, sequences)
        parameters.n_ubatch = int(options.get("ubatch", "512"))
        parameters.n_threads = parameters.n_threads_batch = self._settings.threads
        parameters.kv_unified = options.get("unified", "yes") == "yes"
        parameters.flash_attn_type = _FLASH[options.get("flash", "auto")]
        parameters.no_perf = True
        handle = api.llama_init_from_model(self._model, parameters)
        if not handle:
            raise ValueError(f"llama.cpp made no context for {parameters.n_ctx} tokens")
        context = _Context(handle, self._vocab, self._vocab_size, parameters.n_batch)
        try:
            yield context
        finally:
            context.free()


class _Context:
    """A context, a batch that is filled anew for each call, and a greedy sampler."""

    def __init__(self, handle: Any, vocab: Any, vocab_size: int, capacity: int) -> None:
        self._handle = handle
        self._vocab = vocab
        self._vocab_size = vocab_size
        self._batch = api.llama_batch_init(capacity, 0, 1)
        self._sampler = api.llama_sampler_init_greedy()
        self._piece = ctypes.create_string_buffer(256)

    def compute(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        *,
        last: int,
    ) -> None:
        """One ``llama_decode``; logits are made for the ``last`` tokens."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index in range(count):
            batch.token[index] = tokens[index]
            batch.pos[index] = positions[index]
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequences[index]
            batch.logits[index] = index >= count - last
        status = api.llama_decode(self._handle, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")

    def sample(self, count: int) -> list[int]:
        """The likeliest token of each of the ``count`` rows of logits, turned into text too."""
        first = self._batch.n_tokens - count
        tokens = [
            api.llama_sampler_sample(self._sampler, self._handle, first + index)
            for index in range(count)
        ]
        for token in tokens:
            api.llama_token_to_piece(self._vocab, token, self._piece, len(self._piece), 0, True)
        return tokens

    def free(self) -> None:
        """Give back all memory."""
        api.llama_sampler_free(self._sampler)
        api.llama_batch_free(self._batch)
        api.llama_free(self._handle)

    def logits(self, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The rows of logits of the last call: ``[count, vocabulary]``."""
        pointer = api.llama_get_logits(self._handle)
        return np.ctypeslib.as_array(pointer, shape=(count, self._vocab_size))

    def copy_sequence(self, targets: Sequence[int]) -> None:
        """Give each target its own copy of sequence 0's KV."""
        size = api.llama_state_seq_get_size(self._handle, 0)
        state = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data(self._handle, state, size, 0)
        for target in targets:
            if not api.llama_state_seq_set_data(self._handle, state, size, target):
                raise RuntimeError(f"the KV could not be copied to sequence {target}")


if __name__ == "__main__":
    serve(LlamaCpp)
