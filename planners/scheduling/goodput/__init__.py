"""Policies that maximize goodput: Pollux and its searches."""
