"""One model over several processes: who holds which part of it, and how the parts meet.

Rank 0 is the engine's own process: it schedules and samples. The others are its children; they hold
their part of the weights and of the KV pool and compute what rank 0 tells them to. Imports the rest
of ``engine/`` only where a rank is made.
"""
