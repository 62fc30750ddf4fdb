"""Rewrites decided by cost (``rewrites``): joins that repeat, subqueries that correlate, sets that are small."""
