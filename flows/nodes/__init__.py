"""``ebbflow local``: Spark workers and GPU nodes of this machine."""
