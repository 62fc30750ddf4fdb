"""Where the study of a tuning run is kept, and which process runs which of its trials."""
