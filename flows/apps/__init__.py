"""``ebbflow apps``: the queries, trainings and tuning runs of a cluster."""
