"""One engine's SQL for a query in the other's."""
