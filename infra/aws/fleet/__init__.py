"""Nodes on AWS: Auto Scaling groups, instances, gangs, and what has been planned of them."""
