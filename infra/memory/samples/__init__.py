"""Samples of data sets in nodes' memory: what is decoded once is read by later epochs, whatever process reads it."""
