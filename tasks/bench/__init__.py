"""Ebbflow against plain Spark SQL on one local cluster, while its workers come and go."""
