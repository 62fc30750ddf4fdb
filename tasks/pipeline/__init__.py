"""Pipelines: queries, trainings and searches of several teams on one elastic cluster, from one file."""
