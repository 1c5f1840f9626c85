"""Programs that measure tokenpath, and its peers beside it. Nothing of this is installed."""
