"""A query as a chain of views: blocks, outer joins, conditions pushed down, fingerprints."""
