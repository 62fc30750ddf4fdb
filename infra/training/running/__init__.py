"""Partial checkpoints of a training, saved while it runs (SCAR)."""
