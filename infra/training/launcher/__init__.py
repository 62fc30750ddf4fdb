"""Elastic training on nodes that come and go: one torchrun agent per node, launched anew for every world."""
