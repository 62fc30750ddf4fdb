"""A training in experiment trackers: one run over all its restarts."""
