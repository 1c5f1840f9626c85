"""The stages of the path, in order: the rows of the stage ledger."""

from __future__ import annotations

import enum


class Stage(enum.StrEnum):
    """A stretch of a request's life with its own start and end on one process's monotonic clock."""

    RECEIVE = "receive"
    """Reading and parsing the body."""
    AUTHENTICATE = "authenticate"
    POLICY = "policy"
    """Limits and parameter checks that need no tokens, and choosing the model."""
    CONTEXT = "context"
    TOKENIZE = "tokenize"
    """Rendering the chat template and encoding it."""
    GUARD = "guard"
    CACHE = "cache"
    ROUTE = "route"
    """Admission and choosing a replica."""
    QUEUE = "queue"
    """Waiting in the engine, from the request's arrival there."""
    PREFILL = "prefill"
    KV_TRANSFER = "kv_transfer"
    """Waiting for keys and values that another replica computes and hands over."""
    DECODE = "decode"
    OUTPUT_GUARD = "output_guard"
    FLUSH = "flush"
    """Sending what is left after the engine has finished: the client's and the socket's time."""


ENGINE_STAGES = (Stage.QUEUE, Stage.PREFILL, Stage.KV_TRANSFER, Stage.DECODE)
"""Measured by the replica and reported with a sequence's last event; the gateway measures the
others."""
