"""What is measured: the stage ledger, Prometheus metrics and the request log.

Part of the floor: imports ``protocol`` and ``config`` only. Everything shown elsewhere is a view
of the ledger that lives here.
"""
