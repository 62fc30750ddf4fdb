"""Training workloads in the simulator: which policies, which agents, which files."""
