"""What a running driver's scheduler is told: how many executors to keep, which are lost, whose tasks come first."""
