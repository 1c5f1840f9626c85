"""`make bench-peers`: other engines on this machine, on the work that tokenpath's is measured on.

`compare` alternates contenders and prints the table; `install` gives each rival an environment of
its own; `drivers/` run in those environments and know nothing of tokenpath.
"""
