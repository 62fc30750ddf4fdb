"""What all flow runs and commands share: blocks in parameters, cancelling, stopping, artifacts, options."""
