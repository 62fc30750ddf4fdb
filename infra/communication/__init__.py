"""Planned communication of a training: pieces of collectives on channels, in one order on all ranks."""
