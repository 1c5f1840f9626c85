"""Quantizes a model and measures what it cost and gained: size, perplexity, decode speed.

The rounding itself is ``models.quantized``'s, the calibration ``engine.calibration``'s; here they
are put together with the other benchmarks' measures.
"""
