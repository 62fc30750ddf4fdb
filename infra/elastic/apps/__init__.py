"""Applications for elastic executors."""
