"""Stages that DuckDB computes in the tasks of an ordinary Spark job."""
