"""Partial-allocation auctions of GPUs: the problem, exact and fast winners, payments (Themis)."""
