"""OpenAI's wire format: request bodies, answers, stream chunks, errors, and their description.

Knows nothing of replicas: ``gateway.generate`` runs a call and asks these modules to read and write
it.
"""
