"""``tokenpath bench retrieval``: what a number type costs an embedding model, and what it saves.

Runs the pooling engine in its own process, on a task that is cut out of a fixed text.
"""
