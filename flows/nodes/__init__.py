"""``ebbflow nodes`` and ``ebbflow cluster``: nodes and a Spark cluster of this machine."""
