"""Durable state (SQLAlchemy; SQLite by default): API keys, and whether one was ever created.

Part of the floor: imports ``protocol`` and ``config`` only.
"""
