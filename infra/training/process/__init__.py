"""A training process: its process group, its channel to the launcher, leaving."""
