"""Simulated training clusters: virtual clock, workloads, faults, traces."""
