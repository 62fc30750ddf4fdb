"""A training whose gradients meet at aggregators: its processes come and go while the others train on."""
