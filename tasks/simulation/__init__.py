"""QOOP's evaluation in simulation: what is run, on which workload, and what is written."""
