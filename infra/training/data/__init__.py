"""The samples of a training run: read by number, packed into rows of tokens, fed to each process."""
