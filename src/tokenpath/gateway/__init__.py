"""The HTTP front door: OpenAI-compatible API, authentication, limits, streaming.

Imports ``router``, ``fleet``'s client side, and the floor.
"""
