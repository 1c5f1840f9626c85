"""One driver per rival. Each runs in its rival's environment: standard library and rival only."""
