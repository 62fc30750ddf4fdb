"""Tables whose log tells which files they have: Delta Lake and Iceberg."""
