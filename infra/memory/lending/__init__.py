"""The side of remote memory that lends: the daemon, its slabs and connections, and how it runs as a process."""
