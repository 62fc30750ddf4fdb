"""Notices from AWS: reading events from the queue, remembering them, and those that could not be read."""
