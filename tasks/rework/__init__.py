"""What losing parameters costs: SCAR's evaluation made again on models that a CPU trains in seconds."""
