"""The one validated spec: pydantic models, a reader that knows lines, and the places on disk.

Part of the floor: imports ``protocol`` only.
"""
