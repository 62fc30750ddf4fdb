"""The master of an elastic job: where executors and shards are, moving them, snapshots, recovery."""
