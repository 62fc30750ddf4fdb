"""The capacity loop as a process: one a cluster, the only writer of its nodes and leases."""
