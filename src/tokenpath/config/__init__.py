"""The one validated spec: its pydantic models, its reader with line numbers, and the places on disk.

Part of the floor: imports ``protocol`` only.
"""
