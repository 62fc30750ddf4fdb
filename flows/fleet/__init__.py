"""``ebbflow fleet``: the nodes of a cluster on AWS, from commands and as Prefect tasks."""
