"""Decisions about trials: early stopping, predicted convergence."""
