"""Apps of a cluster: trainings, searches and queries that live on what the capacity loop lets them use.

Each enters the ledger, follows its leases there, and reports; see ``AppAgent``.
"""
