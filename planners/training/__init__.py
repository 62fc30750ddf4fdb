"""Models of training: throughput, goodput, batch size and learning rate."""
