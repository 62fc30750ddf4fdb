"""``ebbflow ledger``: commands, and how the ledger's events read."""
