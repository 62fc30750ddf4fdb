"""Files on any filesystem: atomic writes, checksums, permissions, locks, places."""
