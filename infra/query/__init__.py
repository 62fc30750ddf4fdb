"""What queries run on besides Spark: DuckDB, checkpoints of stages, results, calibration, shared stages."""
