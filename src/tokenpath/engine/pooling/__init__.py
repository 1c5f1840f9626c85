"""The engine that reads whole inputs and gives a vector for each: embeddings, scores, classes.

It stands beside the generating engine behind the same worker and the same link. There is no KV pool
and no sampling: a step reads complete inputs, and what it leaves behind is one row for each.
"""
