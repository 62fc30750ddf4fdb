"""A training whose processes all-reduce gradients, and come and go while the others keep their processes."""
