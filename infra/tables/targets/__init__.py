"""Tables that results are written into: of Delta Lake, of Iceberg, and directories of Parquet files."""
