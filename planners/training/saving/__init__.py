"""Checkpoints of trainings: when, which parameters, what losing them costs, the order of data."""
