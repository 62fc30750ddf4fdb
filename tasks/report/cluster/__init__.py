"""The page of a cluster: what it did, and why."""
