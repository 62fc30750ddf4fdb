"""Failures of trainings: their kinds, what logs say, retries, stragglers, a first short run."""
