"""Pages: of a query, a training, a cluster."""
