"""Simulated training jobs, by what is known of them."""
