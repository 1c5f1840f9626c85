"""Measures what rounding costs in quality: the perplexity of a model on a fixed text.

As ``bench.engine`` it runs the engine in this process, through its scheduler and paged cache; only
what stands between core and runner is its own.
"""
