"""Policies that lease GPUs one at a time by a key: Gandiva, SLAQ, shortest first, DRF."""
