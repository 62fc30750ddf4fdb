"""The state of a local fleet: one file that all processes read and change."""
