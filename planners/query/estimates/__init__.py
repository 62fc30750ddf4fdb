"""Estimates of rows: selectivity of predicates, cardinality of joins."""
