"""Policies that decide shares of time, and rounds that carry them out (Gavel)."""
