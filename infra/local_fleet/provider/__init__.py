"""The provider of a local fleet: a process that starts, watches and ends nodes."""
