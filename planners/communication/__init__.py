"""How the communication of a training is cut, placed on channels and ordered (Syndicate, NSDI 2023; thesis ch. 4)."""
