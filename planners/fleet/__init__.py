"""Decisions about nodes that cost money: which market, how many, within which limits."""
