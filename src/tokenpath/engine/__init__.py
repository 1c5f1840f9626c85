"""The runtime: engine loop, model runner, model families, kernels, sampling, detokenization.

Imports the floor only (``protocol``, ``policy``, ``models``, ``config``, ``observe``). Needs the
``engine`` extra (torch).
"""
