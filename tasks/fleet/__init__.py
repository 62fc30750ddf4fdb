"""A fleet on AWS: observing, planning, applying, gangs, money."""
