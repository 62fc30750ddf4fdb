"""Models of training speed: throughput, goodput, gradient noise, batch size."""
