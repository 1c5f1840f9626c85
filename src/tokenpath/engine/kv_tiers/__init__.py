"""KV blocks outside the pool: in host memory and in files.

``policy/tiers.py`` decides what comes back; here it is kept, copied, checked and written. Imports
the floor and, of the engine, the KV cache, the kernels' memory and the identity of packed weights.
"""
