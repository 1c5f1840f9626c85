"""The types that travel: requests, events, errors, stages and the replica link's frames.

Everything here is plain data (frozen msgspec structs) that any room may hold and any process may
send. This room imports nothing of tokenpath, only msgspec and the standard library, so that a
policy, a gateway and a simulator can share it without dragging in torch or a web server.
"""
