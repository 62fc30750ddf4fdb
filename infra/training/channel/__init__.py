"""The encrypted channel between a launcher and its nodes: keys, messages, both ends, and streams through it."""
