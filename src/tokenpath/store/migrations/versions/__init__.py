"""One file a schema change, named by its revision; ``SCHEMA_REVISION`` names the newest."""
