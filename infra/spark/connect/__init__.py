"""Queries in a session of Spark Connect."""
