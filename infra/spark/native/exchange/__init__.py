"""Rows that tasks of native stages exchange: whether that pays, what is written, and which task joins what of it."""
