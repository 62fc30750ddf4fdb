"""Gradients of a training: noise, norms, preconditioners, tuning the batch size (Pollux)."""
