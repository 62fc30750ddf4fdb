"""Pipelines: queries, trainings and tuning runs of several teams on one elastic cluster, from one file."""
