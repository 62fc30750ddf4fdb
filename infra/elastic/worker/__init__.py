"""The worker process of an elastic job: executors, and the shards that it serves."""
