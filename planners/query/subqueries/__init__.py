"""Subqueries: what repeats, what correlates, what can be factored out or lifted."""
