"""Full checkpoints of a training: writing, verifying, reading."""
