"""Simulated clusters that decide in rounds over measured throughputs (Gavel, Shockwave)."""
