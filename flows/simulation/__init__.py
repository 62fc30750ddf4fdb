"""``ebbflow simulate``: schedulers, shared aggregation and shared memory in simulation."""
