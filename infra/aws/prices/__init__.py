"""Prices on AWS: Spot price history, lists of on-demand prices, facts about instance types."""
