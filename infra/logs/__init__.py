"""Logs of processes on nodes that go: kept in the run's directory, and read from it."""
