"""Matrices that a checkpoint stores as codes and scales: GPTQ, AWQ, compressed-tensors, FP8.

Opening a folder (``methods`` and the modules it names) reads headers and the configuration, loads
no torch, and gives every quantized matrix its logical shape and name. ``matrix`` turns codes into
float32 rows when weights are loaded. ``rounding`` and ``writer`` go the other way.
"""
