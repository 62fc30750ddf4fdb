"""Tables: reading Parquet, statistics, samples, clustering, benchmark data."""
