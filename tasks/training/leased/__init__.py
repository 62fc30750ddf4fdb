"""A training as an app of a cluster, on GPUs that it leases."""
