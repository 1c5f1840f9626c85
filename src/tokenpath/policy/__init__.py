"""Every decision of the path, as plain Python over plain data: no torch, no sockets, no asyncio.

Time comes in as an argument or an injected clock, randomness as an injected seed. The engine loop,
the router and the controller call these classes; a simulator with a virtual clock calls the very
same ones. Imports only ``protocol``, the standard library and NumPy.
"""
