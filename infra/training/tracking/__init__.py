"""What experiment trackers (MLflow, Weights & Biases) hear of a training, from a record in its directory."""
