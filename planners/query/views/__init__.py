"""A query as a chain of views (``views.REWRITES``): its blocks, the types of columns, fingerprints."""
