"""Policies that place whole jobs: FIFO, LAS, Tiresias, Gittins, Philly, Optimus."""
