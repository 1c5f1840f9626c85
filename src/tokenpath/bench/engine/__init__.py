"""Measures the engine in this process: works, rounds, rooflines, and the report of them.

The rest of ``bench`` looks at a server from outside, as its clients do. These modules look at the
engine alone, so that its speed is told apart from HTTP's; they are imported by the command that
needs them, because they import torch.
"""
