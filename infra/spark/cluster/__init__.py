"""A Spark cluster on this machine: its processes, its state, its end."""
