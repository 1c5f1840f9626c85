"""Structured output: from a schema or a grammar to the tokens that may come next.

``compiler`` turns a request's grammar into a compiled one, in threads of its own and once for all
who ask for it; ``schema``, ``endless`` and ``sources`` read what users write; ``vocabulary``,
``state`` and ``masks`` are what a step uses. Only ``vocabulary`` and ``compiled`` know the library
that does the work. May import the floor; imports nothing here.
"""
