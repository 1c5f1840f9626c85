"""Alembic's migrations of the state database, run by ``store/database.py``."""
