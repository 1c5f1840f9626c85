"""How models write what is more than text: tool calls and reasoning, found in a stream of text.

Pure state machines over characters: nothing here does I/O, looks at a clock or imports torch.
``reader`` splits an answer, ``shapes`` says what a call looks like, ``families`` and ``derive``
know the shapes of models, ``detect`` chooses them, ``constraint`` says them as a grammar.
"""
