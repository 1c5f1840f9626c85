"""Blocks of keys and values on their way from a replica that prefills to one that decodes.

``policy/handover.py`` says who prefills for whom; ``giving.py`` is the prefilling side,
``fetch.py`` and ``arrivals.py`` are the decoding one. Imports the floor and, of the engine,
``kv_tiers``: a block leaves its process in one form, wherever it goes.
"""
