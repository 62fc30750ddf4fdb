"""The ledger's database: connections, tables, errors, and what to do when it does not answer."""
