"""How hyper-parameter searches slow down where a job's GPUs are spread (Themis, NSDI 2020, sections 2 and 8)."""

from ebbflow.infra.sim.plain import Locality

NETWORK = Locality(1.0, 1.29, 1.6)
"""Network-intensive models; the two points that are published."""

COMPUTE = Locality(1.0, 1.0, 1.02)
"""Compute-intensive models."""
