"""Makes forms of a model that no tool of the rivals makes by itself."""
