"""Trainings whose parameters, gradients and optimizer state are sharded over processes (FSDP2, HSDP)."""
