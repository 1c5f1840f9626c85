"""Models to fetch, read and talk to: catalogue, checkpoints, tokenizers, templates, dialects.

Part of the floor: imports ``protocol`` and ``config`` only. Nothing but ``weights`` imports torch,
so that the gateway can render and tokenize without it.
"""
