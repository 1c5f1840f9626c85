"""The ``tokenpath`` command. May import every room."""
