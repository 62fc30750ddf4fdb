"""Elastic training on nodes that come and go: one torchrun agent per node, launched again for every world."""
