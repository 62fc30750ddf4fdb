"""``ebbflow bench``: the command, and how its comparison looks on a terminal."""
