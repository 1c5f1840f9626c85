"""The bridge to compute: paged attention, matrix products and element-wise steps.

Nothing outside this folder knows whether a kernel is torch or native code.
"""
