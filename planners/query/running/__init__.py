"""While a query runs: which stage next, progress, when to change to another plan."""
