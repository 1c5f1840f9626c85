"""Benchmarks that anyone can rerun: load on any OpenAI-compatible endpoint, and its report.

Imports the floor only; it measures from outside, as a client does.
"""
